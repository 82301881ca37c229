"""The CUDA allocator's history, as torch hands it out, becomes blocks with the tensors' names."""

from types import SimpleNamespace
from typing import Any

from components.titan.memory.allocator import allocated, blocks_of, caller, join
from components.titan.memory.ledger import Entry
from components.titan.memory.places import Place
from components.titan.memory.timeline import Block


def event(action: str, address: int, microseconds: int, size: int = 512) -> dict[str, Any]:
    frames = [
        {"filename": "/x/torch/nn/functional.py", "line": 1},
        {"filename": "/x/kernels/kda/fla.py", "line": 7},
    ]
    row = {"action": action, "addr": address, "time_us": microseconds, "size": size}
    return row | {"frames": frames}


def test_the_allocators_history_is_replayed() -> None:
    events = [
        *[event("segment_alloc", 0, 1), event("alloc", 64, 1_000_100)],
        {"action": "oom", "device_free": 0, "time_us": 1_000_150, "size": 1},
        *[event("free_requested", 64, 1_000_200), event("free_completed", 64, 1_000_200)],
        *[event("alloc", 64, 3_000_000, 1024), event("free_requested", 64, 3_500_000)],
        *[event("free_completed", 8, 4_000_000), event("free_completed", 99, 4_000_000)],
    ]
    blocks = blocks_of([(8, 2048), (16, 4096)], events, lambda us: us / 1e6 - 2)
    found = [(address, b.nbytes, b.born, b.died, b.maker) for address, b in blocks]
    # The mark before the step is gone; a block waits for its stream until the free is completed.
    assert found == [
        *[(8, 2048, 0.0, 2.0, ""), (16, 4096, 0.0, None, "")],
        (64, 1024, 1.0, None, "kda/fla.py:7"),
    ]


def test_blocks_in_use_are_read_off_a_snapshot() -> None:
    rows = [("active_allocated", 1), ("inactive", 2), ("active_pending_free", 3)]
    blocks = [{"state": s, "address": a, "size": 512, "requested_size": 10 * a} for s, a in rows]
    other = {"device": 1, "blocks": [blocks[0]]}
    snapshot = {"segments": [{"device": 0, "blocks": blocks}, other]}
    assert allocated(snapshot, 0) == [(1, 10), (3, 30)]
    assert caller([{"filename": "??", "line": 0}]) == ""


def test_allocations_get_the_names_of_the_tensors_in_them() -> None:
    def entry(address: int, block: Block) -> Entry:
        return Entry(block, address, SimpleNamespace())

    blocks = [
        (8, Block(2048, 0.0)),
        *[(64, Block(512, 1.0, 2.0)), (64, Block(512, 3.0, 4.0)), (64, Block(512, 5.0))],
        (72, Block(512, 6.0)),
    ]
    up = Place("forward", "layers.0.up")
    entries = [
        entry(8, Block(2000, 0.0, shape=(500,), dtype="float32", category="parameters", name="w")),
        entry(64, Block(500, 3.1, 4.0, up, shape=(125,), dtype="float32", maker="mul")),
        entry(64, Block(1, 4.5, None, up, shape=(9,), dtype="bool")),
        entry(80, Block(1, 6.5, None, up, shape=(9,), dtype="bool")),
    ]
    join(blocks, entries, lambda time: Place("backward", "layers.0"))
    named = [(b.shape, b.category, b.name, b.place.work) for _, b in blocks]
    assert named == [
        ((500,), "parameters", "w", "data"),
        (None, "other", "", "backward"),
        ((125,), "other", "", "forward"),
        *[(None, "other", "", "backward"), (None, "other", "", "backward")],
    ]
