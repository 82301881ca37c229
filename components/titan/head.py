"""The vocabulary projection outside of FSDP: cut as FSDP2 would cut it, gathered for
rings of fewer ranks alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig

from components.core.shards import local_of
from components.titan.plan import ParallelizeFn
from components.vocabulary.layout import VocabularyLayout


@runtime_checkable
class FreezesItself(Protocol):
    """A decoder that decides which of its parameters are trained."""

    def freeze(self) -> None: ...


def keep_head_sharded(parallelize: ParallelizeFn) -> ParallelizeFn:
    """Hide the output head from a ``parallelize_fn``, and shard it like its neighbour afterwards.

    The head's weight becomes what FSDP2 would have made of it: a DTensor on the mesh that FSDP
    chose, in the dtype it was built with. Checkpoints, gradient clipping and optimizers do not see
    a difference. Its forward cannot be called any more: a loss must work on the shards.

    The function raises ValueError for a head with a bias, which such a loss would leave out.
    """

    def parallelize_around_head(
        model: Any, *, training: TrainingConfig, **kwargs: Any
    ) -> nn.Module:
        head, model.lm_head = model.lm_head, None
        if getattr(head, "bias", None) is not None:
            raise ValueError(
                "components.ring_dtp.enabled: true cannot be used with an output head that has a "
                "bias; legal: a model without, or false"
            )
        model = parallelize(model, training=training, **kwargs)
        _shard_like(head, model.norm.weight)
        # Where other modules have FSDP's policy: what a low-precision copy of it would be in.
        head.working_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
        model.lm_head = head
        if isinstance(model, FreezesItself):
            # It has frozen its parameters already, but could not see the head.
            model.freeze()
        return model

    return parallelize_around_head


def _shard_like(head: nn.Module, neighbour: torch.Tensor) -> None:
    """Shard the head on the mesh of another parameter, which the norm of gradients asks for."""
    if isinstance(neighbour, DTensor):
        whole = head.weight
        assert isinstance(whole, nn.Parameter)
        sharded = distribute_tensor(
            whole.detach(), neighbour.device_mesh, neighbour.placements, src_data_rank=None
        )
        head.weight = nn.Parameter(sharded, requires_grad=whole.requires_grad)


@dataclass(frozen=True)
class Rings:
    """This rank's place among the ranks that share the vocabulary.

    Attributes:
        layout: which rows every ring rank computes with.
        q: rank in the ring.
        ring: consecutive FSDP ranks with the whole vocabulary; None for one rank.
        across: the ranks with the same rows, one of each ring of a replica, by their order in
            FSDP; None where a replica is one ring.
        replicas: the ranks with the same shard, one of each replica; None for one replica.
    """

    layout: VocabularyLayout
    q: int
    ring: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None


def rings_of(weight: torch.Tensor, degree: int | None, timeout: timedelta) -> Rings:
    """Form the rings. Collective: every rank of the job calls it, at the same place.

    Args:
        weight: (V, H), sharded by FSDP along its rows, or a plain tensor (one rank).
        degree: ranks of a ring, a divisor of the FSDP ranks; None: all of them.
        timeout: of collectives in groups that are made here.

    Raises:
        ValueError: ``degree`` is no divisor of the FSDP ranks.
    """
    if not isinstance(weight, DTensor):
        return Rings(VocabularyLayout(weight.shape[0], 1, degree or 1), 0)
    mesh, axis = weight.device_mesh, weight.placements.index(Shard(0))
    ranks = mesh.size(axis)
    layout = VocabularyLayout(weight.shape[0], ranks, degree or ranks)
    q = mesh.get_local_rank(axis) % layout.ring
    ring, across = _groups(mesh, axis, layout.ring, timeout)
    return Rings(layout, q, ring, across, _replicas(mesh, axis))


def _groups(
    mesh: DeviceMesh, axis: int, ring: int, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The groups of a ring and across rings: FSDP's own where one of them has all its ranks."""
    ranks = mesh.size(axis)
    if ranks == 1:
        return None, None
    if ring == ranks:
        return mesh.get_group(axis), None
    if ring == 1:
        return None, mesh.get_group(axis)
    # (replicas x rings of one replica, ring): without tensor and pipeline ranks, all of the job.
    table = mesh.mesh.movedim(axis, -1).reshape(-1, ranks // ring, ring)
    by_ring, by_place = table.flatten(0, 1), table.transpose(1, 2).flatten(0, 1)
    return _mine_of(by_ring.tolist(), timeout), _mine_of(by_place.tolist(), timeout)


def _mine_of(groups: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Make groups that no rank is in twice; the one with this rank."""
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _replicas(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup | None:
    for other in range(mesh.ndim):
        if other != axis and mesh.size(other) > 1:
            return mesh.get_group(other)
    return None


class RingHead:
    """An output head whose weight is used as this rank's compute shard.

    Args:
        head: its ``weight`` is (V, H), as ``keep_head_sharded`` leaves it; looked up at every use.
        rings: see ``rings_of``.
    """

    def __init__(self, head: nn.Module, rings: Rings) -> None:
        self._head = head
        self._rings = rings

    @property
    def _weight(self) -> nn.Parameter:
        weight = self._head.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @torch.no_grad()
    def shard(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The compute shard, (rows of this ring rank, H), contiguous; the master weight itself
        where nothing has to be cast or gathered: not to be written to."""
        layout, across = self._rings.layout, self._rings.across
        local = local_of(self._weight)
        if across is None:
            return local.to(device=device, dtype=dtype).contiguous()
        width = local.shape[1]
        # Rows of padding arrive at the end of what is gathered, and are never read.
        padded = torch.empty(layout.chunk, width, dtype=dtype, device=device)
        padded[: local.shape[0]].copy_(local)
        gathered = torch.empty(layout.padded_rows, width, dtype=dtype, device=device)
        dist.all_gather_single(gathered, padded, group=across)
        return gathered[: layout.rows(self._rings.q)]

    @contextmanager
    def gradient(self, device: torch.device) -> Iterator[torch.Tensor | None]:
        """A buffer for the compute shard's gradient, that is in the weight's ``grad`` at the end.

        Yields:
            float32, like the compute shard, to be added to in place: ``grad`` itself where it needs
            no sum over ranks. None where the head is frozen. What the buffer holds already is no
            concern of the caller's.
        """
        weight, rings = self._weight, self._rings
        if not weight.requires_grad:
            yield None
            return
        dtype = weight.grad_dtype or torch.float32
        kept = local_of(weight)
        summed = rings.across is not None or rings.replicas is not None
        if not summed and dtype == torch.float32 and kept.device == device:
            yield local_of(_gradient_of(weight, dtype))
            return
        layout = rings.layout
        rows = kept.shape[0] if rings.across is None else layout.padded_rows
        buffer = torch.zeros(rows, kept.shape[1], dtype=torch.float32, device=device)
        yield buffer[: layout.rows(rings.q)]
        share = self._sum(buffer)
        local_of(_gradient_of(weight, dtype)).add_(share[: kept.shape[0]].to(kept.device))

    def _sum(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum over rings and replicas; the rows of this rank's FSDP shard, perhaps padded."""
        layout, across, replicas = self._rings.layout, self._rings.across, self._rings.replicas
        share = buffer
        if across is not None:
            share = torch.empty_like(buffer[: layout.chunk])
            dist.reduce_scatter_single(share, buffer, group=across)
        if replicas is not None:
            dist.all_reduce(share, group=replicas)
        return share


def _gradient_of(weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """The weight's ``grad``, made of zeros if it has none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    return weight.grad
