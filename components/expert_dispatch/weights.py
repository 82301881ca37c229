"""Experts' weights to the ranks that help with them, and gradients of those copies home.

Every rank posts its sends and receives in the plan's order of transfers, so the two ends of a pair
agree on what comes first. A rank without transfers takes no part.

An expert that everybody chooses has a copy on nearly every rank. Gradients of copies come home in
rounds, the same on all ranks, none of which brings a rank more than its own experts' size.
"""

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from components.expert_dispatch.plan import Plan, Transfer
from kernels.precision import accumulation_dtype

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
        _meet(made)
        _GROUPS[group] = made
    return _GROUPS[group]


def _meet(group: dist.ProcessGroup) -> None:
    """NCCL wants all ranks in a group's first exchange; later ones may leave some out."""
    on_gpu = "nccl" in dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def rounds(plan: Plan, copies: int) -> dict[Transfer, int]:
    """In which round the gradients of each transfer go home: of one rank's experts, ``copies`` a
    round, in the order of transfers."""
    found: dict[Transfer, int] = {}
    seen: dict[int, int] = {}
    for move in plan.transfers:
        before = seen.get(move.native, 0)
        found[move], seen[move.native] = before // copies, before + 1
    return found


class Migration:
    """The transfers of one layer, as one rank sees them.

    Attributes:
        rounds: in which gradients of one parameter come home.
    """

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
        self._rounds = rounds(plan, self._share)
        self.rounds = max(self._rounds.values(), default=-1) + 1

    @property
    def foreign(self) -> int:
        """Experts that this rank helps with; ascending, as its holdings are."""
        return len(self._coming)

    def fetch(self, weights: Sequence[torch.Tensor]) -> "Fetch":
        """Ask for copies of foreign experts, and send this rank's own to whoever asks.

        Args:
            weights: of the experts that live here, each (E / P, ...); as they are until the copies
                have arrived.
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
        return Fetch(foreign, self._run(operations), weights)

    def send_home(self, foreign: torch.Tensor | None, own: torch.Tensor) -> Iterator["Return"]:
        """Send the gradients of one parameter's copies to the rank where it lives, a round each
        time the next is asked for; rounds without this rank are left out.

        All rounds of a parameter before the next parameter's, on every rank.

        Args:
            foreign: of the copies here, (foreign, ...), in full precision; None if there are none.
            own: tells the shape of those of this rank's experts, (E / P, ...).
        """
        for turn in range(self.rounds):
            operations, arriving = [], []
            for place, move in enumerate(self._coming):
                if self._rounds[move] == turn:
                    assert foreign is not None
                    operations.append(self._to(move.native, foreign[place]))
            for move in self._leaving:
                if self._rounds[move] == turn:
                    into = own.new_empty(own.shape[1:], dtype=accumulation_dtype(own.dtype))
                    arriving.append((move.expert % self._share, into))
                    operations.append(self._from(move.helper, into))
            if operations:
                yield Return(arriving, self._run(operations), foreign)

    def _to(self, peer: int, tensor: torch.Tensor) -> dist.P2POp:
        return self._operation(dist.isend, peer, tensor)

    def _from(self, peer: int, tensor: torch.Tensor) -> dist.P2POp:
        return self._operation(dist.irecv, peer, tensor)

    def _operation(self, kind: Callable, peer: int, tensor: torch.Tensor) -> dist.P2POp:
        # By its number within the group, which may hold any ranks of the run.
        return dist.P2POp(kind, tensor, group=self._group, group_peer=peer)

    @staticmethod
    def _run(operations: list[dist.P2POp]) -> list[dist.Work]:
        return dist.batch_isend_irecv(operations) if operations else []


class Fetch:
    """Copies of foreign experts under way.

    Attributes:
        copies: of each parameter, (foreign, ...); their values come with ``wait``.
    """

    def __init__(
        self,
        copies: list[torch.Tensor],
        works: list[dist.Work],
        lent: Sequence[torch.Tensor],
    ) -> None:
        self.copies, self._works, self._lent = copies, works, lent

    def wait(self) -> list[torch.Tensor]:
        """The copies, there for what is computed from now on. Call it on every rank: this one's
        weights may be changed only afterwards."""
        for work in self._works:
            work.wait()
        self._works, self._lent = [], ()
        return self.copies


class Return:
    """Gradients of copies of one parameter under way to where it lives, of one round."""

    def __init__(
        self,
        arriving: list[tuple[int, torch.Tensor]],
        works: list[dist.Work],
        leaving: torch.Tensor | None,
    ) -> None:
        self._arriving, self._works, self._leaving = arriving, works, leaving

    def add_to(self, own: torch.Tensor) -> None:
        """Add what has come for this rank's experts to their own (E / P, ...), in place, in the
        order of transfers; summed in full precision, and rounded once if ``own`` is not in it."""
        for work in self._works:
            work.wait()
        arriving, self._works, self._arriving, self._leaving = self._arriving, [], [], None
        sums: dict[int, torch.Tensor] = {}
        for expert, gradient in arriving:
            if expert not in sums:
                sums[expert] = own[expert].to(gradient.dtype)
            sums[expert] += gradient
        for expert, total in sums.items():
            own[expert] = total
