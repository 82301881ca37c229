"""Inputs for tests of kernels, and what compilers make of kernels."""

from typing import Any

import torch


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers that depend on nothing but the arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def first_form(source: Any) -> str:
    """A kernel as Triton first writes it down for Hopper, from its source with types."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({})
    ir.load_dialects(context)
    backend.load_dialects(context)
    code, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(target, options, code, modules, context))
