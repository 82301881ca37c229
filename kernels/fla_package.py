"""What must hold before a kernel of flash-linear-attention (the package fla-core) is called.

Its modules are imported inside the functions that call them: they want Triton and look for a GPU.
"""

import os

import torch

SWITCH = "FLA_FLASH_KDA"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse_other_than(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors are on CUDA and share one of ``DTYPES``."""
    for name, tensor in tensors.items():
        if not tensor.is_cuda:
            raise ValueError(
                f"model.kda_kernel: 'fla' runs on CUDA only, and {name} is on {tensor.device}; "
                "legal there: 'reference'"
            )
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(found.values())) > 1 or not set(found.values()) <= set(DTYPES):
        raise ValueError(f"dtypes: {found}; legal for fla: all one of {list(DTYPES)}")


def switch_off_flash_kda() -> None:
    """Keep fla from a forward-only kernel that it prefers, where installed, without gradients.

    A checkpoint that runs its first pass without gradients would then compare two kernels. fla's
    switch is an environment variable, read at every call; a value that turns it on is refused.
    """
    value = os.environ.setdefault(SWITCH, "0")
    if value != "0":
        raise ValueError(
            f"environment variable {SWITCH}: {value!r} lets fla compute some forward passes with a "
            "kernel that has no backward; legal: '0' or unset"
        )
