"""What exists at 128K and 1M tokens, on the meta device: nothing that grows with queries x keys.

The caps, for GLM-5.3-Flash's widths in bfloat16, beside inputs, outputs and their gradients: no
tensor of sparse attention above 512 MiB or 2 KiB per token of the batch (the latents' gradient in
float32); nothing of the absorbed form above ``chunk_bytes`` in sum.
"""

import math
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.dsa import sparse_mla
from tests.unit.absorbed_support import offer

HEADS, RANK, WIDTH, SIZE, POOLS = 64, 512, 256, 4, 512
CAP = 512 * 2**20
LATENT_GRADIENT = RANK * 4


class Shapes:
    """Kernels that only say what they return."""

    def forward(self, q: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward(
        self, q: torch.Tensor, latent: Any, pools: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mass = q.new_empty(pools.shape, dtype=torch.float32) if options["probabilities"] else None
        return torch.empty_like(q), mass


class Ledger(TorchDispatchMode):
    """Bytes of each storage that is made while this is on, and how many live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if is_tensor(x)}
        out = function(*args, **(kwargs or {}))
        for tensor in filter(is_tensor, tree_leaves(out)):
            if tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._alive = {k: kept for k, kept in self._alive.items() if not kept[0].expired()}
        reference, size = StorageWeakRef(storage), storage.nbytes()
        if reference.cdata not in self._alive:
            self.sizes.append(size)
            self._alive[reference.cdata] = reference, size
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def inputs(queries: int, tokens: int) -> list[torch.Tensor]:
    """q, latent, kv_b, pools, position and start."""
    return [
        empty(queries, HEADS, WIDTH), empty(tokens, RANK), empty(HEADS * 2 * WIDTH, RANK),
        empty(queries, POOLS, dtype=torch.int32), empty(queries, dtype=torch.int64),
        empty(queries, dtype=torch.int64),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("queries", "tokens"),
    [(2**17, 2**17), (2**14, 2**20), (2**17, 2**20)],
    ids=["128K", "a piece of 1M", "a rank's share of 1M"],
)
@pytest.mark.parametrize("keep", [False, True])
def test_sparse_attention_makes_no_large_tensor(
    queries: int, tokens: int, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, Shapes())
    rest = SIZE, 1 / 16, "fake", sparse_mla.CHUNK_BYTES
    tensors = inputs(queries, tokens)
    with Ledger() as forward:
        out, mixed, lse = sparse_mla.run_forward(*tensors, *rest, keep)
    results = [x.untyped_storage().nbytes() for x in (out, mixed, lse)]
    cap = max(CAP, tokens * RANK * 2)
    assert [s for s in forward.sizes if s > cap] == [s for s in results if s > cap]
    assert forward.peak <= sum(results) + sparse_mla.CHUNK_BYTES + tokens * RANK * 2 + 2**26

    pull = empty(*out.shape)
    with Ledger() as backward:
        grads = sparse_mla.run_backward(pull, *tensors, mixed, lse, *rest)
    results = [x.untyped_storage().nbytes() for x in grads]
    cap = max(CAP, tokens * LATENT_GRADIENT)
    assert [s for s in backward.sizes if s > cap] == [s for s in results if s > cap]
    latents = tokens * (LATENT_GRADIENT + RANK * 2)
    # The maps' gradients in float32, 64 MiB; copies of a chunk in float32 that only a CPU makes.
    slack = 2**26 + sparse_mla.CHUNK_BYTES // 4
    assert backward.peak <= sum(results) + sparse_mla.CHUNK_BYTES + latents + slack


def test_row_offsets_of_the_longest_batch_need_64_bits() -> None:
    """Why kernels compute addresses in int64: elements of one tensor at 1M tokens."""
    assert math.prod((2**20, HEADS, WIDTH)) > 2**31
    assert (2**20 - 1) * HEADS * RANK > 2**31


def test_slices_of_large_tensors_start_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that chunks hand to the kernel, as offsets in numbers, beyond 2^31."""
    offsets: list[int] = []

    class Spy(Shapes):
        def forward(self, q: torch.Tensor, latent: Any, pools: torch.Tensor, *rest: Any, **o: Any):  # type: ignore[no-untyped-def]
            offsets.append(pools.storage_offset())
            return super().forward(q)

    offer(monkeypatch, Spy())
    rows = 2**20
    tensors = inputs(rows, 1024)
    tensors[3] = empty(rows, 4096, dtype=torch.int32)
    sparse_mla.run_forward(*tensors, SIZE, 1.0, "fake", sparse_mla.CHUNK_BYTES, False)
    assert offsets == [begin * 4096 for begin in range(0, rows, 8192)]
    assert offsets[-1] > 2**31
