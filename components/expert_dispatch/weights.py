"""Experts' weights to the ranks that help with them, and gradients of those copies home.

Every rank posts its sends and receives in the plan's order of transfers, so the two ends of a pair
agree on what comes first. A rank without transfers takes no part.
"""

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from components.expert_dispatch.plan import Plan, Transfer

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def weight_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of the same ranks, so that weights and rows do not queue behind each other.

    Made on the first call, which all ranks of ``group`` must make together, and kept while
    ``group`` lives.
    """
    if group not in _GROUPS:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)  # this rank is in it
        _GROUPS[group] = made
    return _GROUPS[group]


class Migration:
    """The transfers of one layer, as one rank sees them."""

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup) -> None:
        """
        Args:
            plan: of the layer.
            rank: this one's, within the group.
            group: of ``weight_group``.
        """
        self._group = group
        self._share = len(plan.loads) // plan.ranks
        self._leaving = [move for move in plan.transfers if move.native == rank]
        self._coming = [move for move in plan.transfers if move.helper == rank]

    @property
    def foreign(self) -> int:
        """Experts that this rank helps with; ascending, as its holdings are."""
        return len(self._coming)

    def fetch(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of foreign experts, and this rank's own to whoever asks.

        Args:
            weights: of the experts that live here, each (E / P, ...).

        Returns:
            Each (foreign, ...).
        """
        foreign = [weight.new_empty(self.foreign, *weight.shape[1:]) for weight in weights]
        operations = []
        for own, others in zip(weights, foreign, strict=True):
            operations += [
                self._to(move.helper, own[move.expert % self._share]) for move in self._leaving
            ]
            operations += [
                self._from(move.native, into)
                for move, into in zip(self._coming, others, strict=True)
            ]
        self._run(operations)
        return foreign

    def send_home(self, foreign: torch.Tensor | None, own: torch.Tensor | None) -> None:
        """Add the gradients of one parameter's copies to those of the rank where it lives.

        Args:
            foreign: of the copies here, (foreign, ...); None if there are none.
            own: (E / P, ...), of the same dtype; added to in place, in the order of transfers. None
                if no copy of this rank's experts has left.
        """
        operations, arriving = [], []
        if self._coming:
            assert foreign is not None
            operations += [
                self._to(move.native, gradient)
                for move, gradient in zip(self._coming, foreign, strict=True)
            ]
        if self._leaving:
            assert own is not None
            arriving = [torch.empty_like(own[0]) for _ in self._leaving]
            operations += [
                self._from(move.helper, into)
                for move, into in zip(self._leaving, arriving, strict=True)
            ]
        self._run(operations)
        for move, gradient in self._arrived(arriving):
            assert own is not None
            own[move.expert % self._share] += gradient

    @property
    def lends(self) -> bool:
        """Whether copies of this rank's experts are elsewhere."""
        return bool(self._leaving)

    def _arrived(self, arriving: list[torch.Tensor]) -> Iterator[tuple[Transfer, torch.Tensor]]:
        return zip(self._leaving, arriving, strict=True)

    def _to(self, peer: int, tensor: torch.Tensor) -> dist.P2POp:
        return self._operation(dist.isend, peer, tensor)

    def _from(self, peer: int, tensor: torch.Tensor) -> dist.P2POp:
        return self._operation(dist.irecv, peer, tensor)

    def _operation(self, kind: Callable, peer: int, tensor: torch.Tensor) -> dist.P2POp:
        # By its number in the whole run: the group may hold any ranks of it.
        everywhere = dist.get_global_rank(self._group, peer)
        return dist.P2POp(kind, tensor, everywhere, self._group)

    @staticmethod
    def _run(operations: list[dist.P2POp]) -> None:
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
