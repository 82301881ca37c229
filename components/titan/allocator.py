"""How CUDA's caching allocator keeps memory."""

import torch

_KEY = "expandable_segments"


def expand_segments() -> str:
    """Let segments grow and shrink, so that freed memory serves tensors of any size.

    Else a freed segment serves those that fit into it, and what is reserved grows beyond what is
    allocated where sizes change from layer to layer. Other settings of ``PYTORCH_ALLOC_CONF`` stay.
    Call before the first allocation: only new segments follow. Source: torch, "CUDA semantics",
    memory management.

    Returns:
        What to tell people.
    """
    before = [part for part in torch._C._accelerator_getAllocatorSettings().split(",") if part]
    others = [part for part in before if part.partition(":")[0].strip() != _KEY]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_KEY}:True"]))
    overruled = ", PYTORCH_ALLOC_CONF says otherwise" if f"{_KEY}:False" in before else ""
    kept = f", with {', '.join(others)}" if others else ""
    return f"allocator: segments grow (hardware.expandable_segments=true{overruled}){kept}"
