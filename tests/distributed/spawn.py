"""Run a function on several gloo ranks, one process each.

A process trains once: torchtitan's typed meshes do not survive a second trainer on several ranks.
"""

import importlib
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing

LIMIT_SECONDS = 240


def run_ranks(function: Callable[..., None], world_size: int, folder: Path, *args: Any) -> None:
    """Call ``function(*args)`` in ``world_size`` processes and wait.

    Args:
        function: importable by name; reads its rank from the environment.
        folder: receives ``rank_<n>.error`` for a rank that failed.

    Raises:
        AssertionError: a rank failed; with its traceback.
    """
    from tests.training import free_port

    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    context = multiprocessing.spawn(
        _entry,
        # By name: unpickling the function would import torchtitan before the device is chosen.
        (function.__module__, function.__name__, world_size, port, folder, args),
        nprocs=world_size,
        join=False,
    )
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise AssertionError(f"{function.__name__} hung for {LIMIT_SECONDS} s")
    except Exception as error:
        reports = [file.read_text() for file in sorted(folder.glob("rank_*.error"))]
        raise AssertionError("\n".join(reports) or str(error)) from error


def _entry(
    rank: int, module: str, name: str, world_size: int, port: int, folder: Path, args: tuple
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from components.titan.device import use_cpu

    use_cpu()
    import torch

    from tests.training import set_rank

    torch.set_num_threads(1)
    set_rank(rank, world_size, port)
    try:
        getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        (folder / f"rank_{rank}.error").write_text(f"rank {rank}\n{traceback.format_exc()}")
        raise
