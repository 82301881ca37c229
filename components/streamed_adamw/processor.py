"""Tiles updated by the CPU: gradients come down, master weights go up, three at a time."""

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from components.streamed_adamw.host import BUFFERS, HostState
from components.streamed_adamw.lanes import Lanes, Mark
from components.streamed_adamw.layout import VALUE, Bucket
from components.streamed_adamw.update import Target, part_of, update, within


def device_buffers(targets: Mapping[int, Target]) -> int:
    """Tiles of device memory: a master to be rounded; a gradient to be widened, if one is not
    fp32."""
    return 1 + any(target.gradient.dtype != torch.float32 for target in targets.values())


def buffer_bytes(tiles: Sequence[Bucket], buffers: int) -> int:
    """Bytes of device memory during a step: buffers x largest tile x 4."""
    return buffers * max((tile.size for tile in tiles), default=0) * VALUE


@dataclass(frozen=True)
class _Job:
    """See ``Processor.start``; ``buffers`` is device memory: fp32 (1 or 2, largest tile)."""

    tiles: Sequence[Bucket]
    targets: Mapping[int, Target]
    buffers: torch.Tensor
    final: Mark


class Processor:
    """A thread that updates tiles, with threads of its own for the arithmetic."""

    def __init__(
        self, lanes: Lanes, state: HostState, threads: int, cpus: Collection[int] = ()
    ) -> None:
        """
        Args:
            lanes: of the device.
            state: on the host.
            threads: of the arithmetic, at least 1.
            cpus: cores near the device and the host memory; none given: any.
        """
        self._lanes, self._state = lanes, state
        self._down, self._up = lanes.side(), lanes.side()
        self._pool = ThreadPoolExecutor(1, "streamed_adamw")
        mine = torch.get_num_threads()
        self._pool.submit(_settle_in, lanes.device, threads, cpus).result()
        # The count is a thread's own, but threads that start later would take over the last one.
        torch.set_num_threads(mine)

    def start(self, tiles: Sequence[Bucket], targets: Mapping[int, Target]) -> "Future[float]":
        """Begin to update tiles beside whatever the caller goes on to do.

        Gradients are those of the lane in use. They and the weights are in use until the result is
        there: the seconds from final gradients until all copies were done. An error in the thread
        is raised when the result is asked for, when no copy is under way either.

        Args:
            tiles: in order.
            targets: see ``Streaming.run``.
        """
        largest = max(tile.size for tile in tiles)
        buffers = self._lanes.staging(device_buffers(targets), largest)
        final = self._lanes.computing().mark()
        # The lane up gets its first work when gradients have come down, long after this moment.
        self._down.after(final)
        # The pool holds what it was given for a moment longer than the work takes.
        return self._pool.submit(self._work, [_Job(tiles, targets, buffers, final)])

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    @torch.no_grad()
    def _work(self, handed: list[_Job]) -> float:
        job = handed.pop()
        tiles, final = job.tiles, job.final
        try:
            arrived = self._fetch(job, 0)
            for number, tile in enumerate(tiles):
                mark = arrived
                if number + 1 < len(tiles):
                    arrived = self._fetch(job, number + 1)
                self._lanes.reach(mark)
                self._update(tile, number % BUFFERS, job.targets)
                self._return(tile, job.targets, job.buffers[0])
        finally:
            # Nobody may let go of memory that a copy is using.
            self._lanes.reach(self._down.mark())
            end = self._up.mark()
            self._lanes.reach(end)
        return self._lanes.seconds(final, end)

    def _fetch(self, job: _Job, number: int) -> Mark:
        """Ask for the gradients of a tile; when they have come."""
        tile, turn = job.tiles[number], number % BUFFERS
        with self._down.use():
            for piece in tile.pieces:
                if (target := job.targets.get(piece.parameter)) is None:
                    continue
                place, gradient = within(tile, piece), target.gradient_of(piece)
                if gradient.dtype != torch.float32:
                    gradient = job.buffers[1, place].copy_(gradient)
                self._state.gradients[turn, place].copy_(gradient, non_blocking=True)
        return self._down.mark()

    def _update(self, tile: Bucket, turn: int, targets: Mapping[int, Target]) -> None:
        rows = self._state.rows[:, tile.start : tile.stop]
        gradients = self._state.gradients[turn]
        update(
            [
                part_of(tile, piece, targets[piece.parameter], rows, gradients[within(tile, piece)])
                for piece in tile.pieces
                if piece.parameter in targets
            ]
        )
        self._lanes.let_go(gradients)

    def _return(self, tile: Bucket, targets: Mapping[int, Target], buffer: torch.Tensor) -> None:
        """Refresh the working weights of a tile."""
        with self._up.use():
            masters = buffer[: tile.size]
            masters.copy_(self._state.rows[0, tile.start : tile.stop], non_blocking=True)
            for piece in tile.pieces:
                if (target := targets.get(piece.parameter)) is not None:
                    target.weight_of(piece).copy_(masters[within(tile, piece)])
            self._lanes.let_go(masters)


def _settle_in(device: torch.device, threads: int, cpus: Collection[int]) -> None:
    """Runs in the thread, before anything else: threads for arithmetic inherit its cores."""
    if device.type == "cuda":
        # Whoever leaves a stream goes back to his own device, which is the first one by default:
        # that would open a context there.
        torch.cuda.set_device(device)
    if cpus:
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)
    # Asked for here, or the first use would set it to what other threads have meanwhile.
    if torch.get_num_threads() != threads:
        raise RuntimeError(f"{threads} threads wanted, torch uses {torch.get_num_threads()}")
