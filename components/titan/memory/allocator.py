"""A step's allocations on a CUDA device, from the history that its allocator keeps."""

import pickle
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from components.titan.memory.ledger import Entry
from components.titan.memory.places import Place
from components.titan.memory.timeline import Block

Blocks = list[tuple[int, Block]]
"""Address and block, in order of birth."""

MARK_BYTES = 2**20
"""Size of the allocation by which the allocator's clock is compared with ours."""


class AllocatorHistory:
    """Records one device's allocations and frees, with the Python line that asked for each.

    Sizes are what was asked for: the allocator rounds up to 512 bytes, and more where it does not
    split a block.
    What the history does not hold: memory taken past torch's allocator (NCCL, CUDA contexts).
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before: list[tuple[int, int]] = []
        self._marked_at = 0.0

    def start(self) -> None:
        """Begin to record; what is allocated now counts as there from the beginning."""
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", clear_history=True
        )
        self._before = allocated(torch.cuda.memory._snapshot(), self._device)
        early = time.time_ns()
        mark = torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda")
        self._marked_at = (early + time.time_ns()) / 2e9
        del mark

    def stop(self, file: Path, origin: float) -> Blocks:
        """End recording and keep torch's own snapshot.

        Args:
            file: where the snapshot goes, for torch's memory_viz.
            origin: seconds since the epoch at which the step began.
        """
        snapshot = torch.cuda.memory._snapshot()
        self.cancel()
        with file.open("wb") as out:
            pickle.dump(snapshot, out)
        events = snapshot["device_traces"][self._device]
        first = next(event for event in events if event["action"] == "alloc")
        shift = self._marked_at - first["time_us"] / 1e6 - origin
        return blocks_of(self._before, events, lambda us: us / 1e6 + shift)

    @staticmethod
    def cancel() -> None:
        """End recording and forget."""
        torch.cuda.memory._record_memory_history(None)


def allocated(snapshot: dict[str, Any], device: int) -> list[tuple[int, int]]:
    """(address, bytes asked for) of every block in use."""
    return [
        (block["address"], block["requested_size"])
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"].startswith("active")
    ]


def blocks_of(
    before: Iterable[tuple[int, int]],
    events: Iterable[dict[str, Any]],
    seconds: Callable[[float], float],
) -> Blocks:
    """Replay the history.

    Args:
        before: (address, bytes) of what was there before the first event.
        events: the allocator's, in order: action, addr, size, time_us, frames.
        seconds: the allocator's microseconds -> seconds since the step began.
    """
    blocks: Blocks = [(address, Block(nbytes=nbytes, born=0.0)) for address, nbytes in before]
    alive = dict(blocks)
    for event in events:
        now = seconds(event["time_us"])
        if event["action"] == "alloc":
            block = Block(nbytes=event["size"], born=now, maker=caller(event.get("frames", [])))
            alive[event["addr"]] = block
            blocks.append((event["addr"], block))
        elif event["action"] == "free_completed" and event["addr"] in alive:
            alive.pop(event["addr"]).died = now
    # The mark that sets the clock lives and dies before the step begins.
    return [(a, b) for a, b in blocks if b.died is None or b.died > 0]


def caller(frames: list[dict[str, Any]]) -> str:
    """ "file.py:line" of the innermost frame outside of torch, or ""."""
    for frame in frames:
        name = frame["filename"]
        if name.endswith(".py") and "/torch/" not in name and "/memory/storages.py" not in name:
            return f"{'/'.join(Path(name).parts[-2:])}:{frame['line']}"
    return ""


def join(blocks: Blocks, entries: Iterable[Entry], place_at: Callable[[float], Place]) -> None:
    """Put the ledger's names and categories on the allocator's blocks.

    Args:
        blocks: of the allocator; changed in place.
        entries: of the ledger.
        place_at: place at a time, for memory that no tensor is known for.
    """
    at: dict[int, Blocks] = {}
    for address, block in blocks:
        at.setdefault(address, []).append((address, block))
        if block.born > 0:
            block.place = place_at(block.born)
    for entry in entries:
        here = at.get(entry.address, [])
        # An operation allocates before the ledger learns of its result.
        index = bisect_right(here, entry.block.born, key=lambda pair: pair[1].born) - 1
        if index < 0:
            continue
        block, known = here[index][1], entry.block
        if block.died is not None and block.died <= known.born:
            continue
        block.shape, block.dtype = known.shape, known.dtype
        block.category, block.name = known.category, known.name
        block.maker = block.maker or known.maker
        if known.maker:
            block.place = known.place
