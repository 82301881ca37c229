"""One step over all buckets: some stream through the device, the others are the CPU's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from components.streamed_adamw.host import TILE, HostState, tile_limit
from components.streamed_adamw.lanes import Lanes, Mark
from components.streamed_adamw.layout import VALUE, Bucket, Layout, buckets, split_point
from components.streamed_adamw.processor import Processor, buffer_bytes, device_buffers
from components.streamed_adamw.split import Measured, Times, choose
from components.streamed_adamw.streaming import Streaming, slot_bytes, slot_rows
from components.streamed_adamw.update import Rates, Scratch, Target, within

SAMPLE = 10**9
"""Values that are updated to measure the split: enough for both ways to reach their pace."""


@dataclass(frozen=True)
class Report:
    """What a step did.

    Attributes:
        streamed: values that went through the device, those of untouched buckets left out.
        processed: values that the CPU updated.
        streaming_seconds: from final gradients until the last bucket was on the host again.
        processor_seconds: from final gradients until the last working weight was refreshed.
        staging_bytes: device memory that was taken for the step.
    """

    streamed: int
    processed: int
    streaming_seconds: float
    processor_seconds: float
    staging_bytes: int


def staging_bytes(
    layout: Layout,
    bucket_parameters: int,
    slots: int,
    split: float,
    wide: bool = False,
) -> int:
    """Device memory of a step in which every parameter has a gradient, in bytes.

    Slots x largest bucket x 12, and a tile x 4 for the CPU.

    Args:
        layout: of the parameters of this rank.
        bucket_parameters: values that a bucket may have.
        slots: buckets on the device at a time.
        split: part that the CPU updates.
        wide: a gradient is not fp32: 16 bytes instead of 12, and 8 instead of 4.
    """
    tile = tile_limit(layout, bucket_parameters)
    streamed, tiles = _cut(layout, bucket_parameters, tile, layout.size, split)
    return slot_bytes(streamed, slots, 3 + wide) + buffer_bytes(tiles, 1 + wide)


def staging_limit(
    size: int, bucket_parameters: int, slots: int, split: float | Literal["auto"]
) -> int:
    """Device memory of a step with fp32 gradients at most, in bytes, whatever the parameters are.

    Args:
        size: values of this rank.
        bucket_parameters: values that a bucket may have.
        slots: buckets on the device at a time.
        split: part that the CPU updates; "auto": it may become any.
    """
    limit = bucket_parameters
    streamed = size if split == "auto" else round((1 - split) * size)
    # There are never more buckets than that: two in a row are more than one may hold, but for the
    # parts of a large parameter (cut at multiples of CUT) and what is left beside them.
    held = 1 if streamed <= limit else min(slots, 4 * streamed // limit + 1)
    tile = 0 if split == 0 else min(TILE, limit, size)
    return VALUE * (3 * held * min(limit, streamed) + tile)


class Engine:
    """Both ways to update, and what each of them gets.

    Attributes:
        share: part of the values that the CPU gets.
    """

    def __init__(
        self,
        lanes: Lanes,
        state: HostState,
        layout: Layout,
        bucket_parameters: int,
        slots: int,
        threads: int,
        cpus: Collection[int] = (),
    ) -> None:
        """
        Args:
            lanes: of the device.
            state: on the host.
            layout: of the parameters.
            bucket_parameters: values of a bucket at most.
            slots: buckets on the device at a time.
            threads: of the CPU's updates.
            cpus: cores that they run on; none given: any.
        """
        self._lanes, self._state, self._layout = lanes, state, layout
        self._limit = bucket_parameters
        self._tile = state.gradients.shape[1]
        self._streaming = Streaming(lanes, state.rows, slots)
        self._slots = slots
        self._processor = Processor(lanes, state, threads, cpus) if self._tile else None
        self.share = 0.0
        self._streamed: list[Bucket] = []
        self._tiles: list[Bucket] = []

    def split(self, share: float) -> None:
        """Give the CPU the last ``share`` of the values, to the nearest place for a cut.

        Raises:
            ValueError: there are values for the CPU, which was to update nothing.
        """
        if share > 0 and self._processor is None and self._layout.size:
            raise ValueError(f"share is {share}; it must be 0 where split was 0 at the start")
        size = self._layout.size
        self._streamed, self._tiles = self._cut(size, share)
        self.share = sum(tile.size for tile in self._tiles) / size if size else 0.0

    def run(self, targets: Mapping[int, Target]) -> Report:
        """Update what has a target. Everything is done on the host when this returns.

        Raises:
            Exception: whatever happened in either way; no copy is under way then, but some buckets
                may have been updated.
        """
        streamed = [bucket for bucket in self._streamed if _wanted(bucket, targets)]
        tiles = [tile for tile in self._tiles if _wanted(tile, targets)]
        times, staging = self._both(streamed, tiles, targets)
        return Report(
            sum(bucket.size for bucket in streamed),
            sum(tile.size for tile in tiles),
            times.streaming,
            times.processor,
            staging,
        )

    @torch.no_grad()
    def measure(self) -> Measured:
        """Find the best split. All values on the host are zero, before and after."""
        size = split_point(self._layout, SAMPLE)
        if not size:
            return Measured(0, 0.0, 0.0, 0.0, 0.0)
        target = self._blank(min(size, self._limit))
        targets = dict.fromkeys(range(len(self._layout.counts)), target)
        return choose(lambda share: self._both(*self._cut(size, share), targets)[0], size)

    def refresh(self, weights: Mapping[int, torch.Tensor]) -> None:
        """Round masters into working weights.

        Args:
            weights: parameter -> (n,) on the device.
        """
        lane = self._lanes.computing()
        tiles = buckets(self._layout, min(TILE, self._limit))
        buffer = self._lanes.staging(max((tile.size for tile in tiles), default=0))
        for tile in tiles:
            with lane.use():
                self._round(tile, buffer[: tile.size], weights)
        # The masters may be written again as soon as this returns.
        self._lanes.reach(lane.mark())

    def _round(
        self, tile: Bucket, masters: torch.Tensor, weights: Mapping[int, torch.Tensor]
    ) -> None:
        masters.copy_(self._state.rows[0, tile.start : tile.stop], non_blocking=True)
        for piece in tile.pieces:
            place = slice(piece.first, piece.first + piece.count)
            weights[piece.parameter][place].copy_(masters[within(tile, piece)])

    def close(self) -> None:
        """End the CPU's thread."""
        if self._processor is not None:
            self._processor.close()

    def _cut(self, size: int, share: float) -> tuple[list[Bucket], list[Bucket]]:
        return _cut(self._layout, self._limit, self._tile, size, share)

    def _both(
        self, streamed: Sequence[Bucket], tiles: Sequence[Bucket], targets: Mapping[int, Target]
    ) -> tuple[Times, int]:
        """Update buckets and tiles; seconds, and bytes of staging memory."""
        computing = self._lanes.computing()
        begin = computing.mark()
        future = self._processor.start(tiles, targets) if tiles and self._processor else None
        end: Mark = begin
        try:
            if streamed:
                end = self._streaming.run(streamed, targets)
        finally:
            # The thread first: waiting for the device keeps a core busy that the thread could use.
            try:
                processed = future.result() if future is not None else 0.0
            finally:
                self._streaming.settle()
        # Nothing is under way any more; a device's clock needs to be asked after that.
        whole = computing.mark()
        self._lanes.reach(whole)
        staging = slot_bytes(streamed, self._slots, slot_rows(targets))
        staging += buffer_bytes(tiles, device_buffers(targets))
        times = Times(
            self._lanes.seconds(begin, whole),
            self._lanes.seconds(begin, end) if streamed else 0.0,
            processed,
        )
        return times, staging

    def _blank(self, largest: int) -> Target:
        """Gradients and bf16 weights of zero, for whatever piece."""
        zeros = torch.zeros(largest, device=self._lanes.device)
        rates = Rates(lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
        return Scratch(zeros, zeros.to(torch.bfloat16), 1, rates)


def _wanted(bucket: Bucket, targets: Mapping[int, Target]) -> bool:
    return any(piece.parameter in targets for piece in bucket.pieces)


def _cut(
    layout: Layout, limit: int, tile: int, size: int, share: float
) -> tuple[list[Bucket], list[Bucket]]:
    """Buckets that stream and tiles of the CPU, of the first ``size`` values."""
    middle = split_point(layout, round((1 - share) * size))
    tiles = buckets(layout, tile, middle, size) if tile else []
    return buckets(layout, limit, stop=middle), tiles
