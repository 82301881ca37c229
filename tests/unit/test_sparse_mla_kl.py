"""Attention that trains the indexer in its backward pass, against the two apart."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer_loss import IndexerLoss
from components.models.glm_flash.sparse_kernels import tilelang_sparse_mla
from kernels.attach import attach_loss
from kernels.dsa import absorbed, indexer_loss, plain, sparse_mla
from kernels.dsa.indexer_loss import Teacher, indexer_kl, indexer_kl_of_mass
from kernels.dsa.pooling import Pools, find_pools
from kernels.dsa.select import select_pools
from kernels.dsa.sparse_mla_kl import Student, sparse_mla_kl
from tests.unit.absorbed_support import Gathering, offer
from tests.unit.chunked_support import build, config_of, gradients, runner
from tests.unit.chunked_support import draw as draw_rows
from tests.unit.kernel_support import draw
from tests.unit.test_kernel_shape_budget import (
    CAP,
    LATENT_GRADIENT,
    RANK,
    Ledger,
    Shapes,
    empty,
    inputs,
)

RAGGED = [(1,), (3,), (4,), (37,), (1, 4, 3, 9, 64, 2, 5)]
HEADS, WIDTH, INDEX_WIDTH, SIZE = 3, 6, 5, 4
SCALE, INDEX_SCALE, FACTOR = 0.4, 0.6, 0.7
NAMES = ("out", "q", "latent", "kv_b", "queries", "weights", "keys", "divergence")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    made = Gathering()
    offer(monkeypatch, made)
    return made


class Case:
    """Leaves q, latent, kv_b and the indexer's queries, weights and keys, and where they are."""

    def __init__(self, lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        documents, total = Documents.from_lengths(lengths), sum(lengths)
        self.lengths, self.pools = lengths, find_pools(lengths, SIZE, torch.device("cpu"))
        shapes = [
            (total, HEADS, WIDTH), (total, 7), (HEADS * 2 * WIDTH, 7), (total, 2, INDEX_WIDTH),
            (total, 2), (len(self.pools.first), INDEX_WIDTH),
        ]  # fmt: skip
        self.tensors = [draw(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
        queries, weights, keys = (x.double() for x in self.tensors[3:])
        chosen = select_pools(
            queries, weights, keys, self.pools, documents.position, lengths, size=SIZE, count=3,
            scale=INDEX_SCALE,
        )  # fmt: skip
        self.place = chosen, documents.position, documents.start

    def leaves(self) -> list[torch.Tensor]:
        found = [x.clone() for x in self.tensors]
        if found[4].dtype == torch.bfloat16:
            found[4] = found[4].float()
        return [x.requires_grad_() for x in found]

    def apart(self) -> list[torch.Tensor]:
        """What ``NAMES`` lists, from the plain attention and a loss beside it."""
        leaves, seen = self.leaves(), []
        q, latent, kv_b, *student = leaves
        out = plain.sparse_mla(q, latent, kv_b, *self.place, size=SIZE, scale=SCALE)
        attention = (x.detach() for x in (q, latent, kv_b))
        teacher = Teacher(*attention, *self.place, self.lengths, SIZE, SCALE)
        loss = indexer_kl(*student, self.pools, teacher, INDEX_SCALE, "selected")
        out = attach_loss(out, loss, FACTOR, seen.append)
        return self.pulled(out, leaves, seen)

    def together(self, recompute: bool = False, **options: Any) -> list[torch.Tensor]:
        """The same, from the operation."""
        leaves, seen = self.leaves(), []

        def attend(*leaves: torch.Tensor) -> torch.Tensor:
            student = Student(*leaves[3:], self.pools, INDEX_SCALE, FACTOR, seen.append)
            rest = {"size": SIZE, "scale": SCALE, "backend": "fake", **options}
            return sparse_mla_kl(*leaves[:3], *self.place, student, **rest)

        out = checkpoint(attend, *leaves, use_reentrant=False) if recompute else attend(*leaves)
        return self.pulled(out, leaves, seen)

    def pulled(self, out: Any, leaves: list[torch.Tensor], seen: list[Any]) -> list[torch.Tensor]:
        out.backward(draw(*out.shape, seed=9).to(out.dtype))
        assert len(seen) == 1
        return [out.detach(), *(x.grad for x in leaves), seen[0]]


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("budget", [2**28, 2_000])
def test_outputs_and_all_gradients_are_those_of_the_two_apart(
    lengths: tuple[int, ...], budget: int, kernels: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed, "CHUNK_BYTES", budget)
    case = Case(lengths)
    found, wanted = case.together(chunk_bytes=budget), case.apart()
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert (wanted[-1] > 0) == (max(lengths) >= 2 * SIZE)


def test_the_attention_is_not_computed_again_for_the_loss(
    kernels: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(indexer_loss, "Selected")
    Case((37, 5)).together()
    assert kernels.calls == ["forward", "forward", "backward"]


def test_a_second_forward_counts_the_divergence_once(kernels: Gathering) -> None:
    case = Case((37, 5))
    for name, a, b in zip(NAMES, case.together(recompute=True), case.together(), strict=True):
        assert torch.equal(a, b), name


def test_attention_is_the_same_to_the_bit_without_an_indexer_to_train(kernels: Gathering) -> None:
    case = Case((37, 5))
    leaves = case.leaves()[:3]
    options: dict[str, Any] = {"size": SIZE, "scale": SCALE, "backend": "fake"}
    out = sparse_mla.sparse_mla(*leaves, *case.place, **options)
    out.backward(draw(*out.shape, seed=9))
    for name, a, b in zip(
        NAMES[:4], case.together(), [out, *(x.grad for x in leaves)], strict=False
    ):
        assert torch.equal(a, b), name


def test_bfloat16_differs_from_the_exact_result_by_rounding_alone(kernels: Gathering) -> None:
    low = Case((64, 13), torch.bfloat16)
    exact = Case((64, 13), torch.bfloat16)
    exact.tensors = [x.double() for x in low.tensors]
    found, wanted = low.together(chunk_bytes=3_000), exact.apart()
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 2**-5, name


@pytest.mark.parametrize("emit", [False, True])
def test_the_backward_is_a_well_formed_torch_operation(emit: bool, kernels: Gathering) -> None:
    case = Case((9, 2))
    nothing, pull = torch.empty(0, dtype=torch.float64), draw(11, HEADS, WIDTH)
    arguments = pull, *case.tensors[:3], *case.place, nothing, nothing
    torch.library.opcheck(
        torch.ops.kernels.sparse_mla_backward.default,
        (*arguments, SIZE, SCALE, "fake", 2_000, emit),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_nothing_grows_with_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's share of 128K tokens, 8,192 queries; 32 index heads of 128. The loss adds the
    pools' probabilities, 4 x 512 bytes per query, and one chunk of its own."""
    offer(monkeypatch, Shapes())
    queries, tokens, heads, width = 2**13, 2**17, 32, 128
    *attention, chosen, position, start = inputs(queries, tokens)
    of_student = [
        empty(queries, heads, width), empty(queries, heads, dtype=torch.float32),
        empty(tokens // SIZE, width),
    ]  # fmt: skip
    leaves = [x.requires_grad_() for x in (*attention, *of_student)]
    ids = Pools(empty(tokens // SIZE, dtype=torch.int64), empty(queries, dtype=torch.int64))
    student = Student(*leaves[3:], ids, 1.0, 1.0, lambda loss: None)
    options: dict[str, Any] = {"size": SIZE, "scale": 1 / 16, "backend": "fake"}
    out = sparse_mla_kl(*leaves[:3], chosen, position, start, student, **options)
    pull = empty(*out.shape)
    with Ledger() as ledger:
        grads = torch.autograd.grad(out, leaves, pull)
    results = sum(x.untyped_storage().nbytes() for x in grads)
    mass = queries * chosen.shape[1] * 4
    assert max(ledger.sizes) <= CAP and mass in ledger.sizes
    slack = 2**26 + sparse_mla.CHUNK_BYTES // 4
    work = sparse_mla.CHUNK_BYTES + tokens * (LATENT_GRADIENT + RANK * 2) + slack
    assert ledger.peak <= results + mass + work


def test_the_loss_needs_one_chunk_and_the_gradients() -> None:
    queries, keys = empty(2**12, 32, 128), empty(2**15, 128)
    weights, mass = (empty(2**12, n, dtype=torch.float32) for n in (32, 512))
    chosen = empty(2**12, 512, dtype=torch.int32)
    ids = Pools(empty(2**15, dtype=torch.int64), empty(2**12, dtype=torch.int64))
    with Ledger() as ledger:
        indexer_kl_of_mass(queries, weights, keys, ids, chosen, mass, 1.0, 1.0)
    grads = sum(x.numel() * x.element_size() for x in (queries, weights))
    assert ledger.peak <= grads + keys.numel() * 4 + absorbed.CHUNK_BYTES
    assert ledger.peak > absorbed.CHUNK_BYTES // 2


def trained(kernel: bool, support: str, only: bool) -> torch.nn.Module:
    """A mixer whose indexer learns; everything else too, or is frozen."""
    config = config_of("dsa")
    if kernel:
        config.core = tilelang_sparse_mla(config.core)
    config.indexer_loss = IndexerLoss.Config(
        coefficient=3.0, tokens=200, support=support, kpool=config.core.kpool,
        scale=config.core.scale, index_scale=config.indexer.scale,
    )  # fmt: skip
    made = build(config)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not only or name.startswith("indexer."))
    return made.train()


@pytest.mark.parametrize("support", ["selected", "visible"])
@pytest.mark.parametrize("only", [False, True])
def test_a_mixer_on_a_kernel_trains_all_seven_tensors_as_the_plain_one(
    support: str, only: bool, kernels: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, kernels, "tilelang")
    results = []
    for kernel in (False, True):
        if kernel and support == "selected":
            # Then nothing computes the attention for the loss.
            monkeypatch.delattr(indexer_loss, "Selected")
        made = trained(kernel, support, only)
        out, grads = gradients(made, runner(made, (130, 70)), draw_rows(200))
        results.append([out, made.indexer_loss.divergence, grads])
    (plain_out, plain_loss, wanted), (out, loss, found) = results
    torch.testing.assert_close([out, loss], [plain_out, plain_loss])
    seven = [name for name in wanted if name.startswith("indexer.")]
    assert len(seven) == 7 and all(wanted[name].abs().max() > 0 for name in seven)
    for name, grad in wanted.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(found[name], grad, msg=name)


def test_only_the_indexer_is_reached_where_nothing_before_it_is_trained(
    kernels: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the first sparse layer of a run that trains indexers alone."""
    offer(monkeypatch, kernels, "tilelang")
    grads = []
    for kernel in (False, True):
        made = trained(kernel, "selected", True)
        runner(made, (130, 70))(draw_rows(200)).sum().backward()
        grads.append({n: p.grad for n, p in made.named_parameters() if p.requires_grad})
    assert len(grads[0]) == 7
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)
