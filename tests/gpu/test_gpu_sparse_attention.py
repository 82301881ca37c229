"""On a GPU: sparse attention around kernels, dense, and fla's tuned configurations
(`make test ARGS="-m gpu"`)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchtitan.tools.utils

from components.models.glm_flash.documents import Documents
from kernels.attach import attach_loss
from kernels.backends.ops import INDEXER, SPARSE_MLA
from kernels.backends.registry import ITEMSIZE
from kernels.dsa import dense, plain, sparse_mla
from kernels.dsa.indexer_loss import Teacher, indexer_kl
from kernels.dsa.pooling import find_pools
from kernels.dsa.select import select_pools
from kernels.dsa.sparse_mla_kl import Student, sparse_mla_kl
from kernels.tuned import fla as tuned
from tests.unit.absorbed_support import Gathering, offer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

HEADS, RANK, WIDTH, SIZE, COUNT = 64, 512, 256, 4, 32
LENGTHS = (1, 3, 4, 5, 700, 2, 333)
SHARES = (1e-2, 2e-2)
"""Root mean square error of outputs and of gradients, as a share of what is right."""

PUBLISHED = {
    "model.n_heads": HEADS, "model.kv_lora_rank": RANK, "model.index_kpool": SIZE,
    "model.index_topk": 2048, "model.index_n_heads": 32, "model.index_head_dim": 128, ITEMSIZE: 2,
}  # fmt: skip


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().cuda()


def make() -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """q, latent and kv_b; pools, position and start."""
    documents, total = Documents.from_lengths(LENGTHS, "cuda"), sum(LENGTHS)
    pools = find_pools(LENGTHS, SIZE, torch.device("cuda"))
    chosen = select_pools(
        draw(total, 2, 16, seed=1), draw(total, 2, seed=2).float(),
        draw(len(pools.first), 16, seed=3), pools, documents.position, LENGTHS,
        size=SIZE, count=COUNT, scale=1.0,
    )  # fmt: skip
    kv_b = draw(HEADS * 2 * WIDTH, RANK, seed=6) * RANK**-0.5
    inputs = [draw(total, HEADS, WIDTH, seed=4), draw(total, RANK, seed=5), kv_b]
    return inputs, (chosen, documents.position, documents.start)


def train(attend: Any, inputs: list[torch.Tensor], place: Any, **more: Any) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves, *place, size=SIZE, scale=WIDTH**-0.5, **more)
    out.backward(draw(*out.shape, seed=7).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for name, a, b in zip(("out", "q", "latent", "kv_b"), found, wanted, strict=True):
        error, size = (x.double().square().mean().sqrt().item() for x in (a.double() - b, b))
        share = SHARES[name != "out"]
        assert error <= share * size, f"{name}: off by {error:.2e} (rms) of {size:.2e}"


@pytest.fixture(scope="module")
def exact() -> Iterator[list[torch.Tensor]]:
    inputs, place = make()
    yield train(plain.sparse_mla, [x.double() for x in inputs], place)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk_bytes", [2**30, 2**25])
def test_what_surrounds_a_kernel_rounds_and_no_more(
    keep: bool, chunk_bytes: int, exact: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, Gathering())
    options: dict[str, Any] = {"backend": "fake", "keep": keep, "chunk_bytes": chunk_bytes}
    assert_near(train(sparse_mla.sparse_mla, *make(), **options), exact)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk_bytes", [2**30, 2**25])
def test_attention_in_tilelang(keep: bool, chunk_bytes: int, exact: list[torch.Tensor]) -> None:
    reason = SPARSE_MLA.backends["tilelang"].why_not("cuda", PUBLISHED)
    if reason is not None:
        pytest.skip(reason)
    options: dict[str, Any] = {"backend": "tilelang", "keep": keep, "chunk_bytes": chunk_bytes}
    assert_near(train(sparse_mla.sparse_mla, *make(), **options), exact)


def leaves_of_student() -> list[torch.Tensor]:
    """An indexer's queries, weights and keys: 32 heads of 128."""
    total, pools = sum(LENGTHS), sum(length // SIZE for length in LENGTHS)
    weights = draw(total, 32, seed=9).float() * 32**-0.5
    return [draw(total, 32, 128, seed=8), weights, draw(pools, 128, seed=10)]


def train_both(together: bool, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Output, gradients of q, latent, kv_b and of the indexer's three, and the divergence; from the
    kernel, or from the plain forms of attention and loss."""
    inputs, place = make()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [x.to(dtype) for x in (*inputs, *leaves_of_student())]
    tensors[4] = leaves_of_student()[1].to(wide)
    leaves, seen = [x.requires_grad_() for x in tensors], []
    pools, size, scale = find_pools(LENGTHS, SIZE, torch.device("cuda")), SIZE, WIDTH**-0.5
    if together:
        student = Student(*leaves[3:], pools, 128**-0.5, 0.5, seen.append)
        out = sparse_mla_kl(*leaves[:3], *place, student, size=size, scale=scale, **options)
    else:
        out = plain.sparse_mla(*leaves[:3], *place, size=size, scale=scale)
        teacher = Teacher(*(x.detach() for x in leaves[:3]), *place, LENGTHS, size, scale)
        loss = indexer_kl(*leaves[3:], pools, teacher, 128**-0.5, "selected")
        out = attach_loss(out, loss, 0.5, seen.append)
    out.backward(draw(*out.shape, seed=7).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves), *seen]


@pytest.mark.parametrize("chunk_bytes", [2**30, 2**25])
def test_an_indexer_learns_from_the_kernels_probabilities(chunk_bytes: int) -> None:
    reason = SPARSE_MLA.backends["tilelang"].why_not("cuda", PUBLISHED)
    if reason is not None:
        pytest.skip(reason)
    found = train_both(True, torch.bfloat16, backend="tilelang", chunk_bytes=chunk_bytes)
    wanted = train_both(False, torch.float64)
    assert_near(found[:4], wanted[:4])
    for name, a, b in zip(
        ("queries", "weights", "keys", "divergence"), found[4:], wanted[4:], strict=True
    ):
        error, size = ((x.double()).norm().item() for x in (a.double() - b, b))
        assert error <= SHARES[0] * size, f"{name}: off by {error:.2e} of {size:.2e}"


def test_a_hopper_gpu_takes_the_kernels_by_itself() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not sm_90")
    assert SPARSE_MLA.choose("auto", "cuda", PUBLISHED).backend == "tilelang"
    assert INDEXER.choose("auto", "cuda", PUBLISHED).backend == "triton"


@pytest.mark.parametrize("chunk_bytes", [2**30, 2**22])
def test_the_dense_baseline(chunk_bytes: int, exact: list[torch.Tensor]) -> None:
    assert_near(train(dense.sparse_mla, *make(), chunk_bytes=chunk_bytes), exact)


def test_the_dense_baseline_beyond_what_a_kernel_addresses() -> None:
    """Keys and values of 131,072 tokens and 64 heads are 2**32 elements."""
    tokens, queries = 2**17, 64
    position = torch.arange(tokens - queries, tokens, device="cuda")
    chosen = torch.rand(queries, tokens // SIZE - queries, device="cuda").topk(COUNT).indices
    place = chosen.sort().values.int(), position, torch.zeros_like(position)
    kv_b = draw(HEADS * 2 * WIDTH, RANK, seed=6) * RANK**-0.5
    inputs = [draw(queries, HEADS, WIDTH, seed=4), draw(tokens, RANK, seed=5), kv_b]
    wanted = train(plain.sparse_mla, [x.float() for x in inputs], place)
    assert_near(train(dense.sparse_mla, inputs, place), wanted)


def test_memory_of_a_chunk_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that make nothing but their results: 32,768 queries need no more than 4,096 do."""

    class Nothing(Gathering):
        def forward(self, q: torch.Tensor, *rest: Any, **options: Any) -> Any:
            return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)

        def backward(self, q: torch.Tensor, *rest: Any, **options: Any) -> Any:
            return torch.zeros_like(q), None

    offer(monkeypatch, Nothing())
    queries, chunk = 2**15, 2**28
    place = (
        torch.zeros(queries, 1, dtype=torch.int32, device="cuda"),
        torch.zeros(queries, dtype=torch.int64, device="cuda"),
        torch.zeros(queries, dtype=torch.int64, device="cuda"),
    )
    q, latent = (torch.zeros(queries, *w, device="cuda").bfloat16() for w in ((64, 256), (512,)))
    kv_b = torch.zeros(HEADS * 2 * WIDTH, RANK, device="cuda").bfloat16()
    leaves = [x.requires_grad_() for x in (q, latent, kv_b)]
    options: dict[str, Any] = {"size": SIZE, "scale": 1.0, "backend": "fake"}
    out = sparse_mla.sparse_mla(*leaves, *place, **options, chunk_bytes=chunk)
    pull = torch.zeros_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, pull)
    needed = torch.cuda.max_memory_allocated() - before
    # Gradients of q, latents and maps; the latter two in float32 as well, and a product of maps.
    results = q.nbytes + 3 * latent.nbytes + 3 * kv_b.nbytes + kv_b.nbytes
    assert needed <= results + chunk + 2**27


def test_the_recurrence_measures_nothing_where_there_is_a_file() -> None:
    held, note = tuned.find(torch.cuda.get_device_name())
    if held is None:
        pytest.skip(note)
    import kernels.kda.fla

    assert tuned.use() == len(held.kernels)
    made = {name: tuned.autotuner(k.module, name) for name, k in held.kernels.items()}
    before = {name: len(found.cache) for name, found in made.items()}
    rows = [draw(256, 64, 128, seed=n).requires_grad_() for n in range(4)]
    beta = draw(256, 64, seed=9).sigmoid().detach().requires_grad_()
    a_log, bias = torch.zeros(64, device="cuda"), torch.zeros(64 * 128, device="cuda")
    out = kernels.kda.fla.kda(
        *rows, beta, a_log.requires_grad_(), bias.requires_grad_(), (200, 56), lower_bound=-5.0
    )
    out.float().sum().backward()
    assert {name: len(found.cache) for name, found in made.items()} == before
