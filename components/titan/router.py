"""torchtitan's router, choosing experts once where its layer is recomputed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torchtitan.config import derive, override
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from components.recompute.tape import choice


class KeptChoiceRouter(TokenChoiceTopKRouter):
    """Computes what torchtitan's router does; a second run takes the first one's experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights (B, L, K), expert ids (B, L, K) int64, all scores (B, L, E)."""
        with _KeptTopK(self.num_experts):
            return super().forward(x_BLD, expert_bias_E)


class _KeptTopK(TorchFunctionMode):
    """Makes every choice among ``width`` experts a kept one.

    torchtitan uses the indices of such a top-k alone and reads the scores again by them, so the
    values may come without a graph.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_choice = func in (torch.topk, torch.Tensor.topk) and args[0].shape[-1] == self._width
        if not is_choice:
            return func(*args, **kwargs)
        scores = args[0].detach()
        ids = choice(lambda: func(scores, *args[1:], **kwargs).indices)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


@override(
    target=TokenChoiceTopKRouter.Config, exact=True, description="experts chosen once per step"
)
def keep_choices(cfg: TokenChoiceTopKRouter.Config) -> KeptChoiceRouter.Config:
    return derive(cfg, KeptChoiceRouter.Config)
