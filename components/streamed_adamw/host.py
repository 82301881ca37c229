"""What is kept in host memory: master weights, both moments, and gradients on their way."""

from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from components.streamed_adamw.layout import VALUE, Layout

ROWS = 3
"""Values kept per parameter: master, exp_avg, exp_avg_sq."""

TILE = 2**24
"""Values that the CPU updates at once: enough to keep all its threads busy, and a gradient of
64 MiB on its way meanwhile."""

BUFFERS = 2
"""Gradients on the host at a time: one being used, one arriving."""


class HostMemory(Protocol):
    """Memory of the host, such as a pinned slab."""

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Part of it: uint8 (nbytes,)."""
        ...


def tile_limit(layout: Layout, bucket_parameters: int) -> int:
    """Values that a tile has at most."""
    return min(TILE, bucket_parameters, layout.size)


def host_bytes(layout: Layout, bucket_parameters: int, processor: bool) -> int:
    """Bytes of host memory: 12 per value, and two tiles of gradients for the CPU.

    Args:
        layout: of the parameters of this rank.
        bucket_parameters: values that a bucket may have.
        processor: whether the CPU may update any.
    """
    arriving = BUFFERS * tile_limit(layout, bucket_parameters) if processor else 0
    # A rank may have no values at all, but memory of no bytes is none.
    return max(1, VALUE * (ROWS * layout.size + arriving))


class HostState:
    """Views of the host memory.

    Attributes:
        rows: fp32 (3, layout.size): master, exp_avg, exp_avg_sq.
        gradients: fp32 (2, tile); of no values where the CPU updates nothing.
    """

    def __init__(self, memory: HostMemory, layout: Layout, tile: int) -> None:
        """
        Args:
            memory: ``host_bytes`` of it.
            layout: of the parameters.
            tile: values of a gradient buffer; 0 where the CPU updates nothing.
        """
        kept, arriving = VALUE * ROWS * layout.size, VALUE * BUFFERS * tile
        values = memory.view(0, kept + arriving).view(torch.float32)
        self.rows = values[: ROWS * layout.size].view(ROWS, layout.size)
        self.gradients = values[ROWS * layout.size :].view(BUFFERS, tile)
        self.rows.zero_()
        self._layout = layout

    def lodge(self, number: int, row: int, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor like a parameter whose values are in the host memory.

        Args:
            number: the parameter's in the layout.
            row: 0 master, 1 exp_avg, 2 exp_avg_sq.
            parameter: plain, or a DTensor whose mesh and placements the result takes over.
        """
        begin = self._layout.offsets[number]
        values = self.rows[row, begin : begin + self._layout.counts[number]]
        if not isinstance(parameter, DTensor):
            return values.view(parameter.shape)
        # Made from a local tensor it would move to the mesh's device.
        whole = torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False)
        assert isinstance(whole, DTensor)
        with torch.no_grad():
            local = whole.to_local()
            shaped = values.view(local.shape)
            local.set_(
                shaped.untyped_storage(), shaped.storage_offset(), shaped.shape, shaped.stride()
            )
        return whole
