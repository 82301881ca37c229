"""What must hold on a machine before a kernel written in TileLang is called."""

import importlib.util

import torch

ARCHITECTURE = (9, 0)
"""Compute capability whose matrix and bulk-copy instructions the kernels are written for."""


def why_not(device: str) -> str | None:
    """Why TileLang kernels cannot run on ``device`` ("cpu" or "cuda") of this machine, or None.

    A machine without a GPU that is asked about "cuda" only prepares a run: there the GPU's
    architecture is not known yet, and nothing is said about it.
    """
    if device != "cuda":
        return f"TileLang kernels run on CUDA only, and this run is on the {device}"
    if importlib.util.find_spec("tilelang") is None:
        return "the package tilelang is not installed (requirements.lock has it)"
    if torch.cuda.is_available():
        found = torch.cuda.get_device_capability()
        if found != ARCHITECTURE:
            return f"the GPU is sm_{found[0]}{found[1]}, and the kernels are for sm_90 (H100, H200)"
    return None
