"""AdamW as a recipe writes it, translated to torchtitan's optimizer container."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import TORCH_DTYPE_MAP


@dataclass(kw_only=True, slots=True)
class AdamWSettings:
    """Decoupled weight decay Adam (arXiv 1711.05101), one learning rate for all parameters."""

    lr: float = 3e-4
    """Peak learning rate; the schedule is in `lr_scheduler`."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment per step."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decay per step, multiplied by the learning rate."""

    no_decay: list[str] = field(default_factory=list)
    """Regular expressions over parameter names that get no weight decay, e.g. ["norm", "bias"]."""

    implementation: Literal["fused", "foreach", "for-loop", "fused_opt_states_bf16"] = "fused"
    """How torch runs the update; fused_opt_states_bf16 keeps the moments in bf16 (CUDA only)."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be zero or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; both must be at least 0 and below 1")

    def bytes_per_parameter(self, dtype: str) -> int:
        """Device bytes of one parameter, its gradient and its two moments.

        Args:
            dtype: ``training.dtype``, in which parameters and gradients are kept.
        """
        width = TORCH_DTYPE_MAP[dtype].itemsize
        moment = 2 if self.implementation == "fused_opt_states_bf16" else width
        return 2 * width + 2 * moment

    def container(self) -> OptimizersContainer.Config:
        """torchtitan's config: one group per ``no_decay`` pattern, then all other parameters."""
        plain: dict[str, Any] = {"lr": self.lr, "betas": self.betas, "eps": self.eps}
        groups = [(pattern, 0.0) for pattern in self.no_decay] + [(".*", self.weight_decay)]
        return OptimizersContainer.Config(
            implementation=self.implementation,
            param_groups=[
                ParamGroupConfig(
                    pattern=pattern,
                    optimizer_name="AdamW",
                    optimizer_kwargs={**plain, "weight_decay": decay},
                )
                for pattern, decay in groups
            ],
        )
