"""The mean loss of one rank's tokens, where ranks share a batch."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX

from components.core.shards import local_of


class RankLoss:
    """Sums over one step of a rank's own losses and of its own valid tokens.

    torchtitan divides a rank's losses by the valid tokens of the whole batch that it read, of which
    a context rank computes a part.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None

    def begin(self) -> None:
        """A step begins."""
        self._loss = self._tokens = None

    def count(self, labels: torch.Tensor) -> None:
        """Labels of one accumulation pass, as the model is given them."""
        valid = (local_of(labels) != IGNORE_INDEX).sum()
        self._tokens = valid if self._tokens is None else self._tokens + valid

    def add(self, loss: torch.Tensor, global_valid_tokens: torch.Tensor) -> None:
        """Loss of one accumulation pass: a sum, over the valid tokens of all ranks."""
        total = local_of(loss) * global_valid_tokens
        self._loss = total if self._loss is None else self._loss + total

    def largest(self, mesh: DeviceMesh) -> float:
        """The largest mean of any rank, nats per token; a rank without valid tokens counts as 0.

        Collective over ``mesh``.
        """
        assert self._loss is not None and self._tokens is not None
        mean = self._loss / self._tokens.clamp_min(1)
        dist.all_reduce(mean, dist.ReduceOp.MAX, group=mesh.get_group())
        return mean.item()
