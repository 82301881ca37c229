"""Every test runs torchtitan on the CPU unless it is marked ``gpu``."""

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    import torch

    from components.titan.device import use_device

    wants_gpu = "gpu" in (config.option.markexpr or "") and "not gpu" not in config.option.markexpr
    use_device("auto" if wants_gpu else "cpu")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """Set aside what was imported: each of many collections would walk all of it, half a second."""
    gc.collect()
    gc.freeze()
