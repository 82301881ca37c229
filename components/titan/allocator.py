"""How CUDA's caching allocator keeps memory."""

import torch

_KEY = "expandable_segments"
_ASYNC = "backend:cudaMallocAsync"


def expand_segments() -> str:
    """Let segments grow and shrink, so that freed memory serves tensors of any size.

    Else a freed segment serves those that fit into it, and what is reserved grows beyond what is
    allocated where sizes change from layer to layer. Other settings of ``PYTORCH_ALLOC_CONF`` stay.
    Call before the first allocation: only new segments follow. Source: torch, "CUDA semantics",
    memory management.

    Returns:
        What to tell people.

    Raises:
        ValueError: ``PYTORCH_ALLOC_CONF`` holds what torch cannot read.
    """
    before = _settings()
    others = [part for part in before if part.partition(":")[0] != _KEY]
    if _ASYNC in others:
        return f"allocator: {_ASYNC} has no segments, hardware.expandable_segments=true no effect"
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_KEY}:True"]))
    overruled = ", PYTORCH_ALLOC_CONF says otherwise" if f"{_KEY}:False" in before else ""
    kept = f", with {','.join(others)}" if others else ""
    return f"allocator: segments grow (hardware.expandable_segments=true{overruled}){kept}"


def _settings() -> list[str]:
    """As torch has read them, without the blanks that it allows anywhere."""
    try:
        settings: str = torch._C._accelerator_getAllocatorSettings()
    except ValueError as error:
        raise ValueError(
            f"PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF): {str(error).rstrip('.')}; legal: "
            "unset, or KEY:VALUE,... as in torch's notes on CUDA semantics, such as "
            "max_split_size_mb:128"
        ) from error
    return [part for part in "".join(settings.split()).split(",") if part]
