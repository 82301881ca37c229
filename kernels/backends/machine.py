"""What must hold on a machine before one of this project's Hopper kernels is called."""

import importlib.util

import torch

from kernels.backends.registry import ITEMSIZE, Shape

ARCHITECTURE = (9, 0)
"""Compute capability whose matrix and bulk-copy instructions the kernels are written for."""

BFLOAT16_BYTES = 2


def why_not(package: str, device: str, shape: Shape) -> str | None:
    """Why kernels written in ``package`` ("tilelang", "triton") cannot run, or None if they can.

    A machine without a GPU that is asked about "cuda" only prepares a run: the GPU's architecture
    is not known yet, and nothing is said about it.

    Args:
        package: must be installed.
        device: "cpu" or "cuda".
        shape: its ``ITEMSIZE`` is looked at, where it has one.
    """
    if device != "cuda":
        return f"its kernels run on CUDA only, and this run is on the {device}"
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed (requirements.lock has it)"
    if torch.cuda.is_available():
        found = torch.cuda.get_device_capability()
        if found != ARCHITECTURE:
            return f"its kernels are for sm_90 (H100, H200), and the GPU is sm_{found[0]}{found[1]}"
    if shape.get(ITEMSIZE, BFLOAT16_BYTES) != BFLOAT16_BYTES:
        return f"its kernels compute in bfloat16, and {ITEMSIZE} is float32"
    return None
