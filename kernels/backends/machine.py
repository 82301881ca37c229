"""What must hold on a machine before one of this project's kernels is called."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.backends.registry import ITEMSIZE, Shape

BFLOAT16_BYTES = 2


class Gpus(NamedTuple):
    """GPUs that a kernel runs on.

    Attributes:
        names: for people.
        take: whether it runs on a compute capability.
    """

    names: str
    take: Callable[[tuple[int, int]], bool]


HOPPER = Gpus("sm_90 (H100, H200)", lambda found: found == (9, 0))
"""For kernels in the matrix and bulk-copy instructions of that architecture alone."""

AMPERE_ON = Gpus("sm_80 or newer", lambda found: found >= (8, 0))
ADA_ON = Gpus("sm_89 or newer", lambda found: found >= (8, 9))
"""For products of fp8."""


def why_not(package: str, device: str, gpus: Gpus, shape: Shape) -> str | None:
    """Why kernels written in ``package`` ("tilelang", "triton") cannot run, or None if they can.

    A machine without a GPU that is asked about "cuda" only prepares a run: the GPU's architecture
    is not known yet, and nothing is said about it.

    Args:
        package: must be installed.
        device: "cpu" or "cuda".
        gpus: that the kernels run on.
        shape: its ``ITEMSIZE`` is looked at, where it has one.
    """
    if device != "cuda":
        return f"its kernels run on CUDA only, and this run is on the {device}"
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed (requirements.lock has it)"
    if torch.cuda.is_available():
        found = torch.cuda.get_device_capability()
        if not gpus.take(found):
            return f"its kernels are for {gpus.names}, and the GPU is sm_{found[0]}{found[1]}"
    if shape.get(ITEMSIZE, BFLOAT16_BYTES) != BFLOAT16_BYTES:
        return f"its kernels compute in bfloat16, and {ITEMSIZE} is float32"
    return None
