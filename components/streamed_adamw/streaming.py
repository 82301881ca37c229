"""Buckets updated on the device: up, updated and down again, three at a time."""

from collections.abc import Mapping, Sequence

import torch

from components.streamed_adamw.lanes import Lane, Lanes, Mark
from components.streamed_adamw.layout import VALUE, Bucket
from components.streamed_adamw.update import Target, part_of, update, within


def slot_rows(targets: Mapping[int, Target]) -> int:
    """Rows of a slot: master and moments, and the gradient where one is not fp32 on its own."""
    return 3 + any(target.gradient.dtype != torch.float32 for target in targets.values())


def slot_bytes(buckets: Sequence[Bucket], slots: int, rows: int) -> int:
    """Bytes of staging memory on the device: slots x largest bucket x rows x 4.

    Args:
        buckets: what is streamed in a step; where they are fewer, so are the slots.
        slots: buckets on the device at a time.
        rows: 3; 4 where a gradient is not fp32.
    """
    largest = max((bucket.size for bucket in buckets), default=0)
    return min(slots, len(buckets)) * largest * rows * VALUE


class Streaming:
    """Three lanes: copies to the device, the computation, copies to the host."""

    def __init__(self, lanes: Lanes, rows: torch.Tensor, slots: int) -> None:
        """
        Args:
            lanes: of the device.
            rows: fp32 (3, flat) on the host: master, exp_avg, exp_avg_sq.
            slots: buckets on the device at a time.
        """
        self._lanes, self._host, self._slots = lanes, rows, slots
        self._up, self._down = lanes.side(), lanes.side()

    def run(self, buckets: Sequence[Bucket], targets: Mapping[int, Target]) -> Mark:
        """Ask for the update of buckets; when it is done. The host does not wait.

        Gradients are those of the lane in use. Staging memory and gradients are in use until the
        mark is reached, so the caller holds ``targets`` until then; staging memory is the lane's
        in use again when that lane has waited for it, as it has when this returns.

        Args:
            buckets: in order.
            targets: parameter -> what its update needs; parameters that are missing are left as
                they are.
        """
        computing = self._lanes.computing()
        rows = slot_rows(targets)
        largest = max(bucket.size for bucket in buckets)
        slots = self._lanes.staging(min(self._slots, len(buckets)), rows, largest)
        # The memory may be another's whose last use has been asked for but has not happened yet.
        free: list[Mark] = [computing.mark()] * len(slots)
        for number, bucket in enumerate(buckets):
            turn = number % len(slots)
            slot = slots[turn, :, : bucket.size]
            self._up.after(free[turn])
            self._move(self._up, slot[:3], self._host[:, bucket.start : bucket.stop])
            computing.after(self._up.mark())
            with computing.use():
                _update(bucket, slot, targets)
            self._down.after(computing.mark())
            self._move(self._down, self._host[:, bucket.start : bucket.stop], slot[:3])
            with self._down.use():
                self._lanes.let_go(slot)
            free[turn] = self._down.mark()
        computing.after(free[turn])
        return free[turn]

    def settle(self) -> None:
        """Return when no copy is under way, whatever has happened."""
        for lane in (self._up, self._down):
            self._lanes.reach(lane.mark())

    def _move(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        with lane.use():
            # Row by row: together they are not one piece of memory, which a copy engine wants.
            for row, values in zip(target, source, strict=True):
                row.copy_(values, non_blocking=True)


def _update(bucket: Bucket, slot: torch.Tensor, targets: Mapping[int, Target]) -> None:
    parts = []
    for piece in bucket.pieces:
        target = targets.get(piece.parameter)
        if target is None:
            continue
        gradient = target.gradient_of(piece)
        if gradient.dtype != torch.float32:
            gradient = slot[3, within(bucket, piece)].copy_(gradient)
        parts.append((piece, part_of(bucket, piece, target, slot, gradient)))
    update([part for _, part in parts])
    for piece, part in parts:
        part.target.weight_of(piece).copy_(part.master)
