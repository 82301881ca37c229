"""Sparse attention around an absorbed kernel against the plain form, with a stand-in kernel."""

from typing import Any

import pytest
import torch

from components.models.glm_flash.documents import Documents
from kernels.backends.ops import SPARSE_MLA
from kernels.backends.registry import Backend
from kernels.dsa import dense, plain, sparse_mla
from kernels.dsa.pooling import find_pools
from kernels.dsa.select import select_pools
from tests.unit.absorbed_support import Gathering, offer
from tests.unit.kernel_support import draw

RAGGED = [(1,), (3,), (5,), (37,), (1, 4, 3, 9, 64, 2, 5)]
HEADS, RANK, D_QK, D_V, SIZE = 3, 5, 6, 7, 4
SCALE = 0.4


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    made = Gathering()
    offer(monkeypatch, made)
    return made


def make(lengths: tuple[int, ...]) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """q, latent and kv_b; pools, position and start."""
    documents, total = Documents.from_lengths(lengths), sum(lengths)
    pools = find_pools(lengths, SIZE, torch.device("cpu"))
    chosen = select_pools(
        draw(total, 1, 3), draw(total, 1, seed=4).abs(), draw(len(pools.first), 3, seed=5), pools,
        documents.position, lengths, size=SIZE, count=2, scale=1.0,
    )  # fmt: skip
    inputs = [
        draw(total, HEADS, D_QK), draw(total, RANK, seed=1),
        draw(HEADS * (D_QK + D_V), RANK, seed=2),
    ]  # fmt: skip
    return inputs, (chosen, documents.position, documents.start)


def train(attend: Any, inputs: list[torch.Tensor], place: Any, **more: Any) -> list[torch.Tensor]:
    """Output and the three gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves, *place, size=SIZE, scale=SCALE, **more)
    out.backward(draw(*out.shape, seed=3).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk_bytes", [2**30, 2_000])
def test_output_and_every_gradient_are_those_of_the_plain_form(
    lengths: tuple[int, ...], keep: bool, chunk_bytes: int, kernels: Gathering
) -> None:
    inputs, place = make(lengths)
    expected = train(plain.sparse_mla, inputs, place)
    found = train(
        sparse_mla.sparse_mla, inputs, place, backend="fake", keep=keep, chunk_bytes=chunk_bytes
    )
    torch.testing.assert_close(found, expected)


def test_bfloat16_differs_from_the_exact_result_by_rounding_alone(kernels: Gathering) -> None:
    inputs, place = make((64, 13))
    low = [x.bfloat16() for x in inputs]
    exact = train(plain.sparse_mla, [x.double() for x in low], place)
    found = train(sparse_mla.sparse_mla, low, place, backend="fake", chunk_bytes=2_000)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert ((a - b).norm() / b.norm()).item() < 2**-6


def test_a_wider_latent_is_rounded_once_and_its_gradient_is_not(kernels: Gathering) -> None:
    inputs, place = make((64, 13))
    q, latent, kv_b = (x.bfloat16() for x in inputs)
    narrow = train(sparse_mla.sparse_mla, [q, latent, kv_b], place, backend="fake")
    wide = train(sparse_mla.sparse_mla, [q, latent.float(), kv_b], place, backend="fake")
    assert torch.equal(wide[0], narrow[0])
    assert wide[2].dtype == torch.float32
    assert torch.equal(wide[2].bfloat16(), narrow[2]) and not torch.equal(wide[2], narrow[2])


def test_the_kernel_runs_again_in_backward_unless_its_outputs_are_kept(kernels: Gathering) -> None:
    inputs, place = make((9,))
    train(sparse_mla.sparse_mla, inputs, place, backend="fake")
    assert kernels.calls == ["forward", "forward", "backward"]
    kernels.calls.clear()
    train(sparse_mla.sparse_mla, inputs, place, backend="fake", keep=True)
    assert kernels.calls == ["forward", "backward"]


def test_nothing_is_kept_where_no_gradient_is_wanted(
    kernels: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, place = make((9,))
    seen = []
    monkeypatch.setattr(sparse_mla, "_forward", lambda *a: seen.append(a[-1]) or [None])
    options: dict[str, Any] = {"size": SIZE, "scale": SCALE, "backend": "fake", "keep": True}
    with torch.no_grad():
        sparse_mla.sparse_mla(*inputs, *place, **options)
    sparse_mla.sparse_mla(*inputs, *place, **options)
    assert seen == [False, True]


def test_only_inputs_are_saved_for_backward(kernels: Gathering) -> None:
    inputs, place = make((37,))
    leaves = [x.requires_grad_() for x in inputs]
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sparse_mla.sparse_mla(*leaves, *place, size=SIZE, scale=SCALE, backend="fake")
    mine = {x.untyped_storage().data_ptr() for x in (*leaves, *place)}
    assert all(t.numel() == 0 or t.untyped_storage().data_ptr() in mine for t in saved)
    assert len(saved) == 8


def test_a_deterministic_run_asks_the_kernel_for_a_fixed_order(
    kernels: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    inputs, place = make((9,))
    train(sparse_mla.sparse_mla, inputs, place, backend="fake")
    assert kernels.calls[-1] == "deterministic backward"


@pytest.mark.parametrize("keep", [False, True])
def test_the_operation_is_a_well_formed_torch_operation(keep: bool, kernels: Gathering) -> None:
    inputs, place = make((9, 2))
    leaves = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(
        torch.ops.kernels.sparse_mla.default,
        (*leaves, *place, SIZE, SCALE, "fake", 2_000, keep),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


class Failing(Gathering):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def test_a_kernel_that_does_not_compile_names_the_setting_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, Failing(ValueError("layout inference failed")))
    inputs, place = make((5,))
    message = (
        r"model.sparse_mla_kernel: 'fake' failed to import, compile or launch \(layout inference "
        r"failed\); 'torch' selects the reference path"
    )
    with pytest.raises(RuntimeError, match=message):
        train(sparse_mla.sparse_mla, inputs, place, backend="fake")


def test_running_out_of_memory_is_not_blamed_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Failing(torch.OutOfMemoryError("CUDA out of memory")))
    inputs, place = make((5,))
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"):
        train(sparse_mla.sparse_mla, inputs, place, backend="fake")


def test_a_package_that_cannot_be_imported_is_named_at_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load() -> Any:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setitem(SPARSE_MLA.backends, "fake", Backend("fake", load))
    inputs, place = make((5,))
    with pytest.raises(RuntimeError, match="'fake' failed to import.*libcudart.*'torch' selects"):
        train(sparse_mla.sparse_mla, inputs, place, backend="fake")


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("chunk_bytes", [2**30, 500])
def test_the_dense_baseline_computes_the_same_function(
    lengths: tuple[int, ...], chunk_bytes: int
) -> None:
    inputs, place = make(lengths)
    expected = train(plain.sparse_mla, inputs, place)
    found = train(dense.sparse_mla, inputs, place, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("together", [1, 2, HEADS])
def test_the_dense_baseline_takes_no_more_heads_than_a_kernel_addresses(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, place = make((7, 1, 24))
    q, latent, kv_b = inputs
    width = len(kv_b) // HEADS
    monkeypatch.setattr(dense, "MOST_ELEMENTS", (together + 1) * len(latent) * width - 1)
    seen = []
    attend = dense._attend
    monkeypatch.setattr(dense, "_attend", lambda q, *a: seen.append(q.shape[1]) or attend(q, *a))
    found = train(dense.sparse_mla, inputs, place)
    torch.testing.assert_close(found, train(plain.sparse_mla, inputs, place))
    assert max(seen) <= together and set(seen) >= {min(together, HEADS)}


def test_the_dense_baseline_refuses_a_head_that_no_kernel_addresses() -> None:
    assert dense.heads_together(2**16, 64, 512) == 32
    assert dense.heads_together(2**16 - 1, 64, 512) == 64
    assert dense.heads_together(2**20, 64, 512) == 3
    assert dense.heads_together(0, 64, 512) == 64
    with pytest.raises(ValueError, match=r"sparse_mla_kernel: .*4,194,304 tokens.*to 4,194,303"):
        dense.heads_together(2**22, 64, 512)


def test_the_dense_baseline_holds_few_queries_of_a_later_piece_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, place = make((40, 100))
    seen = []
    attend = dense._attend
    monkeypatch.setattr(dense, "_attend", lambda q, *a: seen.append((len(q), a)) or attend(q, *a))
    q, latent, kv_b = inputs
    piece = [x[60:] for x in (q, *place)]
    options: dict[str, Any] = {"size": SIZE, "scale": SCALE, "chunk_bytes": 9_000}
    out = dense.sparse_mla(piece[0], latent, kv_b, *piece[1:], **options)
    whole = plain.sparse_mla(*inputs, *place, size=SIZE, scale=SCALE)
    torch.testing.assert_close(out, whole[60:])
    assert sum(queries for queries, _ in seen) == 80
    assert all(4 * HEADS * rest[1].numel() <= 9_000 for _, rest in seen)
