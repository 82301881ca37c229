"""How the flat space is cut: nothing is lost, nothing is too large, and cuts are where they may be.

And how the part of the CPU is found.
"""

import random

import pytest

from components.streamed_adamw.engine import staging_bytes, staging_limit
from components.streamed_adamw.host import TILE, host_bytes
from components.streamed_adamw.layout import (
    ALIGNMENT,
    CUT,
    Bucket,
    Layout,
    buckets,
    lay_out,
    split_point,
)
from components.streamed_adamw.split import PURE_UNLESS, Times, choose


def some_layout(seed: int) -> Layout:
    draw = random.Random(seed)
    sizes = [0, 1, 3, 4, 63, 64, 65, 100, 1000, 1024, 4999]
    return lay_out([draw.choice(sizes) for _ in range(draw.randrange(1, 12))])


def check(layout: Layout, cut: list[Bucket], limit: int, start: int, stop: int) -> None:
    at, taken = start, dict.fromkeys(range(len(layout.counts)), 0)
    for bucket in cut:
        assert bucket.start == at and 0 < bucket.size <= limit
        at = bucket.stop
        for piece in bucket.pieces:
            offset = layout.offsets[piece.parameter]
            assert piece.offset == offset + piece.first and piece.count > 0
            assert piece.offset % ALIGNMENT == 0 and piece.first % CUT == 0
            assert bucket.start <= piece.offset and piece.offset + piece.count <= bucket.stop
            taken[piece.parameter] += piece.count
    if cut:
        assert at == stop
    for number, (offset, count) in enumerate(zip(layout.offsets, layout.counts, strict=True)):
        inside = max(0, min(stop, offset + count) - max(start, offset))
        assert taken[number] == inside


@pytest.mark.parametrize("limit", [64, 100, 512, 1000, 10**6])
def test_buckets_hold_every_value_once(limit: int) -> None:
    for seed in range(100):
        layout = some_layout(seed)
        check(layout, buckets(layout, limit), limit, 0, layout.size)
        middle = split_point(layout, random.Random(seed).randrange(layout.size + 1))
        check(layout, buckets(layout, limit, stop=middle), limit, 0, middle)
        check(layout, buckets(layout, limit, middle), limit, middle, layout.size)


def test_whole_parameters_share_a_bucket_and_a_large_one_is_cut_in_equal_parts() -> None:
    layout = lay_out([100, 200, 800, 2500, 300])
    cut = buckets(layout, 1000)
    assert [[piece.parameter for piece in bucket.pieces] for bucket in cut] == [
        [0, 1], [2], [3], [3], [3], [4],
    ]  # fmt: skip
    assert [bucket.size for bucket in cut] == [300, 800, 896, 896, 708, 300]


def test_a_split_point_is_at_most_a_cut_before_what_was_wanted() -> None:
    for seed in range(50):
        layout = some_layout(seed)
        for wanted in range(0, layout.size + 1, 7):
            assert 0 <= wanted - split_point(layout, wanted) < CUT + ALIGNMENT
        assert split_point(layout, layout.size) == layout.size
        point = split_point(layout, layout.size // 2)
        assert split_point(layout, point) == point


def test_host_memory_is_twelve_bytes_a_value_and_two_tiles_for_the_cpu() -> None:
    billion = lay_out([10**9])
    assert host_bytes(billion, 10**8, processor=False) == 12 * 10**9
    assert host_bytes(billion, 10**8, processor=True) == 12 * 10**9 + 2 * 4 * TILE
    assert host_bytes(billion, 10**6, processor=True) == 12 * 10**9 + 2 * 4 * 10**6
    assert host_bytes(billion, 10**8, processor=True) < 1.02 * 12 * 10**9


@pytest.mark.parametrize("limit", [64, 100, 127, 128, 1000, 5000])
@pytest.mark.parametrize("slots", [1, 2, 7, 10**6])
def test_staging_has_a_limit_that_no_layout_exceeds(slots: int, limit: int) -> None:
    draw = random.Random(limit)
    # Bad ones: parts of just over a half, or of one value, and small parameters between them.
    odd = [[limit + 1, 1] * 9 + [limit], [129, 1] * 9 + [limit], [1, limit] * 9, [limit], [3], []]
    layouts = [lay_out(counts) for counts in odd] + [some_layout(seed) for seed in range(60)]
    for layout in layouts:
        for split in (0, 1, 0.5, draw.random()):
            needed = staging_bytes(layout, limit, slots, split)
            assert needed <= staging_limit(layout.size, limit, slots, split)
            assert needed <= staging_limit(layout.size, limit, slots, "auto")


def test_more_slots_than_buckets_take_no_more_memory() -> None:
    billion = 10**9
    assert staging_limit(billion, 10**8, 2, 0) == 2 * 12 * 10**8
    assert staging_limit(billion, 10**8, 10**6, 0) <= 5 * 12 * billion
    assert staging_limit(10**6, 10**8, 10**6, 0) == 12 * 10**6
    assert staging_limit(billion, 10**8, 2, 1) == 4 * TILE
    assert staging_limit(0, 10**8, 2, "auto") == 0


def machine(streaming: float, processor: float, slowdown: float = 1.0) -> object:
    """Seconds of both ways for everything, alone; beside each other so many times as long."""

    def run(share: float) -> Times:
        factor = slowdown if 0 < share < 1 else 1.0
        ways = (factor * streaming * (1 - share), factor * processor * share)
        return Times(max(ways), *ways)

    return run


@pytest.mark.parametrize(
    ("streaming", "processor", "slowdown", "share"),
    [
        (1.0, 1.0, 1.0, 0.5),
        (1.0, 3.0, 1.0, 0.25),
        (1.0, 3.0, 1.2, 0.25),
        (1.0, 1.0, 2.1, 0.0),
        (1.0, 0.9, 2.1, 1.0),
        (1.0, 100.0, 1.0, 0.0),
    ],
)
def test_both_ways_are_used_where_that_is_faster(
    streaming: float, processor: float, slowdown: float, share: float
) -> None:
    measured = choose(machine(streaming, processor, slowdown), 7)  # type: ignore[arg-type]
    assert measured.share == pytest.approx(share)
    assert (measured.parameters, measured.streaming) == (7, streaming)
    assert measured.processor == processor
    if 0 < share < 1:
        assert measured.both < PURE_UNLESS * min(streaming, processor)


def test_a_measured_share_can_be_written_down() -> None:
    measured = choose(machine(1.0, 1.7), 1)  # type: ignore[arg-type]
    assert measured.share == 0.37
    assert choose(machine(1.0, 1.77), 1).share == 0.361  # type: ignore[arg-type]


def test_the_share_follows_the_rates_beside_each_other() -> None:
    """Alone the CPU is as fast; beside the other way it is three times as slow."""

    def run(share: float) -> Times:
        ways = (1 - share, share * (3 if share < 1 else 1))
        return Times(max(ways), *ways)

    measured = choose(run, 1)
    assert measured.share == pytest.approx(0.25)
    assert measured.both == pytest.approx(0.75)
