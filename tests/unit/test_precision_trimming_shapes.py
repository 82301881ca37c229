"""Trimmed sites at 131,072 tokens on the meta device: no tensor is wider than it must be."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import row_blocks
from kernels.combine import weighted_sum
from kernels.hyper_connections.mapping import project_reference
from kernels.hyper_connections.merge import merge
from kernels.hyper_connections.read import read
from tests.unit.test_precision_trimming import PAIRS


class _Widest(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out)
                 if isinstance(t, torch.Tensor)]  # fmt: skip
        self.nbytes = max(self.nbytes, *sizes, 0)
        return out


LENGTH, WIDTH, HEADS = 131_072, 4096, 64
BLOCK = 4 * row_blocks.ELEMENTS


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


BUDGETS: dict[str, tuple[Callable, list[torch.Tensor], int]] = {
    "project": (
        PAIRS["project"][0],
        [meta(LENGTH, 4 * WIDTH), meta(24, 4 * WIDTH)],
        8 * LENGTH * WIDTH,
    ),
    "sinkhorn": (
        PAIRS["sinkhorn"][0],
        [meta(1, LENGTH, 4, 4, dtype=torch.float32)],
        64 * LENGTH,
    ),
    "read": (
        read,
        [meta(1, LENGTH, 4, WIDTH), meta(1, LENGTH, 4, dtype=torch.float32)],
        8 * LENGTH * WIDTH,
    ),
    "merge": (
        merge,
        [
            meta(1, LENGTH, 4, WIDTH),
            meta(1, LENGTH, WIDTH),
            meta(1, LENGTH, 4, dtype=torch.float32),
            meta(1, LENGTH, 4, 4, dtype=torch.float32),
        ],
        8 * LENGTH * WIDTH,
    ),
    "router": (PAIRS["router"][0], [meta(LENGTH, WIDTH), meta(288, WIDTH)], 2 * LENGTH * WIDTH),
    "rms_norm": (
        PAIRS["rms_norm"][0],
        [meta(1, LENGTH, WIDTH), meta(WIDTH)],
        2 * LENGTH * WIDTH,
    ),
    "gated_rms_norm": (
        PAIRS["gated_rms_norm"][0],
        [meta(LENGTH, HEADS, 128), meta(LENGTH, HEADS, 128), meta(128)],
        2 * LENGTH * HEADS * 128,
    ),
    "expert_combine": (
        lambda rows, place, weights: weighted_sum(rows, place, weights),
        [
            meta(8 * LENGTH, WIDTH),
            meta(LENGTH, 8, dtype=torch.int64),
            meta(LENGTH, 8, dtype=torch.float32),
        ],
        2 * 8 * LENGTH * WIDTH,
    ),
    "swiglu": (
        PAIRS["swiglu"][0],
        [meta(8 * LENGTH, 2048), meta(8 * LENGTH, 2048)],
        2 * 8 * LENGTH * 2048,
    ),
}
"""Site -> its trimmed form, inputs of 131,072 tokens, and bytes of the largest of their gradients:
bfloat16 but for mixing matrices."""


@pytest.mark.parametrize("name", BUDGETS)
def test_no_tensor_of_128k_tokens_is_wider_than_the_gradients(name):
    form, inputs, largest = BUDGETS[name]
    with _Widest() as watcher:
        out = form(*inputs)
        wanted = [t for t in inputs if t.requires_grad]
        torch.autograd.grad(out, wanted, torch.empty_like(out))
    assert largest <= watcher.nbytes <= max(largest, BLOCK)


def test_plain_forms_exceed_the_budget():
    x, weight = meta(LENGTH, 4 * WIDTH), meta(24, 4 * WIDTH)
    with _Widest() as watcher:
        out = project_reference(x, weight, 1e-5)
    assert out.shape == (LENGTH, 24) and watcher.nbytes == 16 * LENGTH * WIDTH
