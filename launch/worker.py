"""One rank of a run: read the frozen recipe, train, say how it ended.

Started as ``python -m launch.worker RUN_DIR`` by torchrun, locally or on a cluster.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.elastic.multiprocessing.errors import record

from components.titan.allocator import expand_segments
from components.titan.device import DeviceKind, use_device
from components.titan.story import narrate
from launch import garbage
from launch.config.sources import read
from launch.logs import configure
from launch.rundir import RunDir

if TYPE_CHECKING:
    from components.core.recipe import Hardware, Recipe


@record
def main(run_dir: str) -> None:
    """Train. Raises whatever made this rank fail, after writing it to the rank's log."""
    run = RunDir(Path(run_dir))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    configure(run.logs / f"rank_{rank}.log", first_rank=rank == 0)
    _stop_when_launcher_dies()
    with garbage.none_while_importing():
        device = use_device(_frozen_device(run))
        # Only now: importing the recipe imports torchtitan, which fixes the device.
        from components.titan.build import prepare
        from launch.config.load import bind_recipe

        data = {key: value for key, (value, _) in read(run.frozen).keys.items() if "." not in key}
        recipe = bind_recipe(data)
        prepared = prepare(recipe, run.path, device, world_size)
    with _explained(recipe):
        set_allocator(recipe.hardware, device)
        for note in prepared.notes:
            narrate(note)
        with prepared.build_and_close() as trainer:
            if recipe.checkpoint.create_seed_checkpoint:
                trainer.save_seed()
            else:
                trainer.train()
            if rank == 0:
                state = "done" if trainer.stopped_by is None else "stopped"
                run.write_status(state=state, step=trainer.step, signal=trainer.stopped_by)


def _frozen_device(run: RunDir) -> DeviceKind:
    device: DeviceKind = read(run.frozen).keys["hardware.device"][0]
    return device


def set_allocator(hardware: "Hardware", device: DeviceKind) -> None:
    """As the recipe says, before anything is on the device; a CPU has no such allocator."""
    if device == "cuda" and hardware.expandable_segments:
        narrate(expand_segments())


def _stop_when_launcher_dies() -> None:
    """Ask Linux for a SIGTERM when the launcher is gone, so that no rank trains on unattended."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@contextlib.contextmanager
def _explained(recipe: "Recipe") -> Iterator[None]:
    """Put failures into the rank's log, and out-of-memory into words."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        logging.exception("out of device memory")
        _leave_the_word_to_the_launcher()
        raise RuntimeError(explain_out_of_memory(error, recipe)) from error
    except CheckpointException as error:
        # Not an Exception to Python, so nobody else would report it.
        logging.exception("a checkpoint could not be written or read")
        _leave_the_word_to_the_launcher()
        first = next(iter(error.failures.values()), (error, None))[0]
        raise RuntimeError(f"checkpoint: {first}") from error
    except Exception:
        logging.exception("this rank failed")
        _leave_the_word_to_the_launcher()
        raise


def _leave_the_word_to_the_launcher() -> None:
    """No traceback on the terminal: it is in the log, and the launcher ends with the error."""
    sys.excepthook = lambda *error: None


def explain_out_of_memory(error: BaseException, recipe: "Recipe") -> str:
    """Name the device, its peak, the batch and what would lower the peak."""
    device = torch.cuda.current_device()
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    return (
        f"out of DEVICE memory on {torch.cuda.get_device_name(device)} "
        f"(peak allocated {peak:.1f} of {total:.1f} GiB): {str(error).splitlines()[0]}\n"
        f"{advice(recipe)}"
    )


def advice(recipe: "Recipe") -> str:
    """What lowers the peak of this recipe: components that are off, then the sizes it chose."""
    from components.core.registry import component_types

    off = [
        f"components.{name}.enabled=true (less memory for {technique.relieves})"
        for name, technique in component_types().items()
        if technique.relieves and not getattr(recipe.components, name).enabled
    ]
    training = recipe.training
    sizes = [
        f"training.local_batch_size below {training.local_batch_size}",
        f"training.seq_len below {training.seq_len}",
        "more ranks",
    ]
    return "What lowers the peak: " + "; ".join(off + sizes) + "."


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m launch.worker RUN_DIR   (started by torchrun)")
    main(sys.argv[1])
    garbage.leave_to_the_system()
