"""One tensor per expert out of stacked tensors, without copies, and back."""

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard


def split_experts(stack: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, matrix) of each expert that this rank holds a part of.

    Args:
        stack: (experts, rows, columns), plain or sharded over any mesh.

    Returns:
        Views into ``stack``: plain where this rank holds whole matrices, otherwise sharded over
        those dimensions of the mesh that cut rows or columns.

    Raises:
        ValueError: a placement is neither a shard nor a replica.
    """
    if not isinstance(stack, DTensor):
        yield from enumerate(stack.detach())
        return
    mesh_names = stack.device_mesh.mesh_dim_names
    if mesh_names is None:
        raise ValueError(f"experts are on a mesh without dimension names: {stack.device_mesh}")
    placed = zip(mesh_names, stack.placements, strict=True)
    cuts = [(name, placement) for name, placement in placed if (_cut(placement) or 0) > 0]
    local = stack._local_tensor.detach()
    for index, matrix in zip(_held_experts(stack), local, strict=True):
        if not cuts:
            yield index, matrix
            continue
        sharded = DTensor.from_local(
            matrix,
            stack.device_mesh[tuple(name for name, _ in cuts)],
            [_one_lower(placement) for _, placement in cuts],
            run_check=False,
            shape=stack.shape[1:],
            stride=(stack.shape[2], 1),
        )
        yield index, sharded


def _cut(placement: Placement) -> int | None:
    """The dimension that a placement shards; None for a replica."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Shard | _StridedShard):
        return placement.dim
    raise ValueError(f"experts are placed as {placement}; expected shards or replicas")


def _held_experts(stack: DTensor) -> list[int]:
    """Indices of this rank's experts, found by sharding the indices as the experts are."""
    placements = [
        placement if _cut(placement) == 0 else Replicate() for placement in stack.placements
    ]
    # Without a source rank nothing is sent: every rank cuts its own copy.
    indices = torch.arange(stack.shape[0], device=stack.device_mesh.device_type)
    shard = distribute_tensor(indices, stack.device_mesh, placements, src_data_rank=None)
    return shard.to_local().tolist()


def _one_lower(placement: Placement) -> Placement:
    """The placement of a matrix whose stack was placed like this, on another dimension than 0."""
    dim = _cut(placement)
    assert dim is not None
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim - 1, split_factor=placement.split_factor)
    return Shard(dim - 1)


def join_experts(name: str, matrices: dict[int, torch.Tensor]) -> torch.Tensor:
    """Copy the matrices of experts 0, 1, ... into one tensor (experts, rows, columns).

    Raises:
        ValueError: an expert before the last is missing.
    """
    missing = sorted(set(range(max(matrices) + 1)) - matrices.keys())
    if missing:
        raise ValueError(f"{name}: experts {missing} are missing")
    return torch.stack([matrices[index] for index in range(len(matrices))])
