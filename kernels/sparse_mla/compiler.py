"""Compiles the TileLang kernels, once per process and shape, for Hopper."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from kernels.backends.machine import HOPPER
from kernels.sparse_mla.shape import Shape

TARGET = {"kind": "cuda", "arch": "sm_90a"}

PASSES = {
    # Merged shared memory made gradients NaN in kernels of this form (radixark/miles #1571).
    "tl.enable_aggressive_shared_memory_merge": False,
    # exp2 as one instruction; sums stay as they are.
    "tl.enable_fast_math": True,
}

_WITHOUT_WARP_ROLES = {"tl.disable_warp_specialized": True}


def passes(kernel: str) -> dict[str, Any]:
    """TileLang's settings for a kernel, by the name of its module."""
    return PASSES if kernel.endswith("split") else PASSES | _WITHOUT_WARP_ROLES


def program(kernel: str, shape: Shape, **options: Any) -> Any:
    """The TileLang function that ``kernels.sparse_mla.<kernel>`` builds."""
    return importlib.import_module(f"kernels.sparse_mla.{kernel}").build(shape, **options)


def compiled(kernel: str, shape: Shape, **options: Any) -> Callable[..., None]:
    """The kernel, to be called with its tensors; outputs are written into those given.

    Compiling takes seconds and happens once per process; TileLang keeps results on disk.

    Args:
        kernel: module that builds it.
        shape: what to compile for.
        options: what its ``build`` takes besides.

    Raises:
        RuntimeError: the kernel does not compile here.
    """
    return _compiled(kernel, shape, tuple(sorted(options.items())))


@functools.cache
def _compiled(kernel: str, shape: Shape, options: tuple[tuple[str, Any], ...]) -> Any:
    import tilelang

    try:
        return tilelang.compile(
            program(kernel, shape, **dict(options)), target=TARGET, pass_configs=passes(kernel)
        )
    except Exception as error:
        raise RuntimeError(
            f"sparse_mla: TileLang {tilelang.__version__} does not compile {kernel} for {shape} "
            f"with {dict(options)}; the torch backend needs no compiler"
        ) from error


def check_device(q: torch.Tensor) -> None:
    """Raises RuntimeError where ``q`` is not on a GPU that the kernels are written for."""
    if not q.is_cuda:
        raise RuntimeError(
            f"sparse_mla: tensors are on {q.device}, the TileLang kernels need a Hopper GPU; "
            "the torch backend runs anywhere"
        )
    capability = torch.cuda.get_device_capability(q.device)
    if not HOPPER.take(capability):
        raise RuntimeError(
            f"sparse_mla: {torch.cuda.get_device_name(q.device)} has compute capability "
            f"{capability}, the TileLang kernels need (9, 0); the torch backend runs anywhere"
        )
