"""torchtitan's chunked loss for any number of tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper


class PaddedChunkedLoss(ChunkedLossWrapper):
    """``ChunkedLossWrapper`` for ranks whose numbers of tokens differ and do not divide.

    Sequences are filled up to a multiple of ``num_chunks`` with tokens whose labels are ignored, so
    that every rank computes as many chunks. The loss and its gradients are those of the tokens.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See the base class.

        Args:
            pred: hidden states (B, L, D).
            labels: int64 (B, L); tensors among ``loss_inputs`` alike.
        """
        missing = -labels.shape[1] % self.num_chunks
        if missing:
            pred = F.pad(pred, (0, 0, 0, missing))
            labels = F.pad(labels, (0, missing), value=IGNORE_INDEX)
            loss_inputs = {
                name: F.pad(value, (0, missing)) if isinstance(value, torch.Tensor) else value
                for name, value in loss_inputs.items()
            }
        return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
