"""Blocks of softmax attention against its definition, and how models' attentions are replaced."""

import gc
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchtitan.models.common.attention import BaseAttention
from torchtitan.models.gpt_oss.sharding import set_gpt_oss_sharding_config

from components.context_parallel.layout import cut_batch
from components.context_parallel.softmax import flex
from components.context_parallel.softmax.attend import Exchange
from components.context_parallel.softmax.flex import DifferentiableKernel, FlexKernel, view_of
from components.context_parallel.softmax.heads import HeadSplit
from components.context_parallel.softmax.kernel import (
    Block,
    Kernel,
    PlainKernel,
    Scores,
    shift_of,
)
from components.context_parallel.softmax.tiles import View
from components.context_parallel.softmax.volume import Heads, softmax_volume
from components.models.glm_flash.documents import Documents
from components.models.library import TitanModel
from components.titan.cp_attention import (
    SharedAttention,
    kernel_on,
    sequence_stays_cut,
    share_attention,
)
from kernels.position.alibi import DistanceBias
from tests.unit.test_kernel_shape_budget import Ledger

LENGTHS, HEADS, KEY_HEADS, WIDTH = (7, 1, 32), 6, 2, 16
TOKENS = sum(LENGTHS)
SCORES = {
    "plain": Scores(0.3),
    "window": Scores(0.3, window=9),
    "slopes": Scores(0.3, slopes=2.0 ** -torch.arange(1, HEADS + 1)),
    "both": Scores(0.3, 9, 2.0 ** -torch.arange(1, HEADS + 1)),
}


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, and gradients of output and log-sum-exp."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, n, WIDTH) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    shapes.append((TOKENS, HEADS))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def block(queries: slice, keys: slice, batch: Any = None) -> Block:
    start = Documents.from_lengths(LENGTHS).start[queries]
    return Block(start, queries.start, keys.start, keys.stop - keys.start, batch)


def whole() -> Block:
    return block(slice(0, TOKENS), slice(0, TOKENS))


def defined(q: Any, k: Any, v: Any, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all tokens, from a dense mask."""
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    found = torch.einsum("qnh,knh->nqk", q, k) * scores.scale
    place = torch.arange(TOKENS)
    distance = place[:, None] - place
    if scores.slopes is not None:
        found = found - scores.slopes[:, None, None] * distance
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = (distance >= 0) & (document[:, None] == document)
    seen &= distance < (scores.window or TOKENS)
    found = found.masked_fill(~seen, -math.inf)
    return torch.einsum("nqk,knh->qnh", found.softmax(-1), v), found.logsumexp(-1).t()


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("elements", [2**24, 500])
def test_a_block_is_attention_by_its_definition(name: str, elements: int) -> None:
    *inputs, grad_out, grad_lse = tensors()
    results = []
    for attend in (PlainKernel().attend, None):
        q, k, v = leaves = [t.clone().requires_grad_() for t in inputs]
        with patch("kernels.row_blocks.ELEMENTS", elements):
            found = attend(q, k, v, whole(), SCORES[name]) if attend else defined(
                q, k, v, SCORES[name]
            )  # fmt: skip
            torch.autograd.backward(found, (grad_out, grad_lse))
        results.append([*(t.detach() for t in found), *(t.grad for t in leaves)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class Autograd(DifferentiableKernel):
    """The plain kernel, as if its backward took no log-sum-exp but its own."""

    def forward(self, *args: Any) -> Any:
        return PlainKernel().forward(*args)

    def attend(self, *args: Any) -> Any:
        return PlainKernel().attend(*args)


@pytest.mark.parametrize(
    "kernel",
    [PlainKernel(), Autograd(), FlexKernel(direct=True)],
    ids=["plain", "autograd", "flex direct"],
)
@pytest.mark.parametrize("name", SCORES)
def test_blocks_of_keys_add_up_in_backward(name: str, kernel: Kernel) -> None:
    q, k, v, grad_out, grad_lse = tensors()
    scores = SCORES[name]
    out, lse = PlainKernel().forward(q, k, v, whole(), scores)
    shift = shift_of(out, grad_out, grad_lse)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.autograd.backward(defined(*leaves, scores), (grad_out, grad_lse))
    sums = [torch.zeros_like(t) for t in (q, k, v)]
    # The first half sees itself; the second the first half, of which many see nothing, and itself.
    half = TOKENS // 2
    first, second = slice(0, half), slice(half, TOKENS)
    for rows, keys in ((first, first), (second, first), (second, second)):
        grads = kernel.backward(
            grad_out[rows], shift[rows], lse[rows], q[rows], k[keys], v[keys], block(rows, keys),
            scores,
        )  # fmt: skip
        for total, some, grad in zip(sums, (rows, keys, keys), grads, strict=True):
            total[some] += grad
    for total, leaf in zip(sums, leaves, strict=True):
        torch.testing.assert_close(total, leaf.grad, rtol=1e-11, atol=1e-11)


class Cheap(DifferentiableKernel):
    """Makes what it returns, and nothing else of its size."""

    def forward(self, *args: Any) -> Any:
        raise AssertionError("backward differentiates attend")

    def attend(self, q: Any, k: Any, v: Any, *others: Any) -> Any:
        return q + (k.sum() + v.sum()), q[..., 0].float()


def test_backward_makes_no_wider_copies_of_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.row_blocks.ELEMENTS", 2**12)
    q = torch.ones(512, 4, 64, dtype=torch.bfloat16)
    k = torch.ones(8, 4, 64, dtype=torch.bfloat16)
    whole_lse, everything = torch.zeros(512, 4), block(slice(0, 512), slice(0, 8))
    with Ledger() as ledger:
        Cheap().backward(q, whole_lse, whole_lse, q, k, k, everything, Scores(1.0))
    # The output, what pulls at it, and what becomes of both: each once, and as narrow as q.
    assert ledger.peak < 5 * q.nbytes, ledger.peak / q.nbytes


@pytest.mark.parametrize("name", SCORES)
def test_flex_attention_computes_the_same_block(name: str) -> None:
    q, k, v, *_ = tensors(torch.float32)
    rows, keys = slice(20, TOKENS), slice(5, 30)
    pieces = q[rows], k[keys], v[keys], block(rows, keys), SCORES[name]
    found = FlexKernel().forward(*pieces)
    for ours, wanted in zip(found, PlainKernel().forward(*pieces), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_bfloat16_are_rounded_once() -> None:
    """Those of a block, whose outputs and log-sum-exps stay in full precision."""
    q, k, v, grad_out, grad_lse = tensors(torch.bfloat16)
    scores, kernel = SCORES["both"], PlainKernel()
    out, lse = kernel.forward(q, k, v, whole(), scores)
    rows, keys = slice(20, TOKENS), slice(5, 30)
    given = (
        grad_out[rows], shift_of(out, grad_out, grad_lse.float())[rows], lse[rows], q[rows],
        k[keys], v[keys], block(rows, keys), scores,
    )  # fmt: skip
    exact = kernel.backward(*given)
    for found, wanted in zip(FlexKernel(direct=True).backward(*given), exact, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


def test_masks_are_made_once_for_a_batch_and_go_with_it() -> None:
    class Batch:
        pass

    batch, rows = Batch(), slice(0, 20)
    view = view_of(block(rows, rows, batch))
    assert view_of(block(rows, rows, batch)) is view
    assert view_of(block(slice(1, 20), rows, batch)) is not view
    assert view_of(block(rows, rows, Batch())) is not view
    assert view.mask(9) is view.mask(9) is not view.mask(None)
    before = len(flex._views)
    del batch
    gc.collect()
    assert len(flex._views) < before


def test_backward_of_blocks_of_any_lengths_shares_compiled_code() -> None:
    """As it is captured; kernels, and layouts that they have been compiled for, need a GPU."""
    graphs = []

    def capture(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    kernel, scores = FlexKernel(direct=True), SCORES["window"]
    with patch.object(flex, "_unfused_gradients", flex.compiled(flex.block_gradients, capture)):
        for queries, ahead in ((300, 200), (513, 33), (1, 3), (256, 256)):
            # Keys and values as they travel, in one row; of whole tiles, and not.
            rows = torch.ones(queries + ahead, 2 * 2 * 16)
            k, v = (t.unflatten(1, (2, 16)) for t in rows.split(32, 1))
            q, lse = torch.ones(queries, 6, 16), torch.zeros(queries, 6)
            start = torch.zeros(queries, dtype=torch.int64)
            piece = Block(start, ahead, 0, queries + ahead)
            kernel.backward(q, lse, lse, q, k, v, piece, scores)
    assert len(graphs) == 1
    operators = [str(node.target) for node in graphs[0].graph.nodes]
    assert "flex_attention_backward" in operators and "flex_attention" not in operators


@pytest.mark.slow
def test_blocks_of_any_lengths_share_compiled_code() -> None:
    """As it is captured; what a compiler makes of it needs a GPU."""
    graphs = []

    def capture(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    generator = torch.Generator().manual_seed(0)
    with patch.object(flex, "flex_attention", flex.compiled(flex.flex_attention, capture)):
        for queries, ahead in ((300, 200), (513, 33), (1, 3), (4, 1000)):
            tokens = queries + ahead
            start = Documents.from_lengths((1, tokens - 1)).start[ahead:]
            piece = Block(start, ahead, 0, tokens)
            q, k, v = (
                torch.randn(shape, generator=generator)
                for shape in ((queries, 4, 16), (tokens, 2, 16), (tokens, 2, 16))
            )
            found = FlexKernel().forward(q, k, v, piece, SCORES["window"])
            wanted = PlainKernel().forward(q, k, v, piece, SCORES["window"])
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(graphs) <= 2, "one, and one for sizes that the first took for constants"


@pytest.mark.parametrize("tokens", [1, 128, 256, 257])
def test_blocks_of_any_length_are_whole_tiles(tokens: int) -> None:
    """Or code would be compiled anew for lengths of one tile, and for every other remainder."""
    start = torch.zeros(tokens, dtype=torch.int64)
    view = View(Block(start, 500, 300, 150))
    assert len(view.queries) == len(view.start) == (384 if tokens == 257 else 256)
    assert len(view.keys) == 256
    assert view.keys[149] == 449 and view.queries[tokens - 1] == 499 + tokens
    # What fills up a block sees nothing and is seen by nobody.
    assert (view.keys[150:] > 10**9).all() and (view.start[tokens:] > view.keys[:150].max()).all()


@pytest.mark.parametrize("window", [None, 1, 40, 128, 200])
@pytest.mark.parametrize(
    ("queries", "keys"), [((0, 700), (0, 700)), ((300, 640), (0, 640)), ((450, 700), (130, 450))]
)
def test_tiles_are_those_in_which_pairs_are_seen(
    queries: tuple[int, int], keys: tuple[int, int], window: int | None
) -> None:
    lengths = (100, 1, 155, 256, 188)
    start = Documents.from_lengths(lengths).start[slice(*queries)]
    view = View(Block(start, queries[0], keys[0], keys[1] - keys[0]))
    mask = view.mask(window)
    pairs = (view.keys >= view.start[:, None]) & (view.keys <= view.queries[:, None])
    pairs &= view.queries[:, None] - view.keys < (window or 1000)
    tiles = pairs.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    some, full = tiles.any(3).any(1), tiles.all(3).all(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), some)
    assert torch.equal(mask.full_kv_num_blocks[0, 0], full.sum(1))
    for row, (count, which) in enumerate(
        zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)
    ):
        assert sorted(which[:count].tolist()) == full[row].nonzero().flatten().tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direct", [False, True], ids=["autograd", "direct"])
@pytest.mark.parametrize("name", SCORES)
def test_flex_attention_on_a_gpu_agrees_with_the_plain_kernel(name: str, direct: bool) -> None:
    lengths, rows, keys = (300, 1, 1747), slice(900, 2048), slice(200, 1500)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(2048, n, 64, generator=generator).cuda().bfloat16() for n in (6, 2, 2, 6)
    )
    start = Documents.from_lengths(lengths, "cuda").start
    slopes = SCORES[name].slopes
    scores = Scores(0.125, SCORES[name].window, None if slopes is None else slopes.cuda())
    everything = Block(start, 0, 0, 2048)
    piece = Block(start[rows], rows.start, keys.start, keys.stop - keys.start)
    results = []
    for kernel, dtype in ((FlexKernel(direct), torch.bfloat16), (PlainKernel(), torch.float32)):
        a, b, c, pull = (t.to(dtype) for t in (q, k, v, grad_out))
        out, lse = kernel.forward(a, b, c, everything, scores)
        shift = shift_of(out, pull, None)
        grads = kernel.backward(
            pull[rows], shift[rows], lse[rows], a[rows], b[keys], c[keys], piece, scores
        )
        results.append([out, lse, *grads])
    for found, wanted in zip(*results, strict=True):
        error = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 1e-2, error


def test_distances_of_pieces_are_those_of_the_sequence() -> None:
    slopes = torch.tensor([0.5, 0.25])
    at = torch.arange(30)
    rows, keys = slice(12, 30), slice(5, 20)
    pieces = DistanceBias(slopes, at[rows], at[keys])
    wanted = DistanceBias(slopes).rows(0, 30, 30)[:, rows, keys]
    assert torch.equal(pieces.rows(0, 18, 15), wanted)
    assert torch.equal(pieces.rows(3, 7, 15), wanted[:, 3:7])
    score = pieces(torch.tensor(1.0), at[0], torch.tensor(1), torch.tensor(3), torch.tensor(4))
    assert score == 1 + wanted[1, 3, 4]


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "copies", "own_keys"),
    [(56, 8, 8, 1, 1), (64, 8, 16, 2, 1), (8, 1, 4, 4, 1), (12, 3, 4, 4, 3), (12, 6, 4, 2, 3)],
)
def test_key_heads_are_copied_as_often_as_ranks_need(
    heads: int, key_heads: int, ranks: int, copies: int, own_keys: int
) -> None:
    split = HeadSplit(heads, key_heads, ranks)
    assert (split.copies, split.own_keys) == (copies, own_keys)
    groups = heads // key_heads
    for rank in range(ranks):
        for n, head in enumerate(range(heads)[split.of(rank)]):
            # The copy that the rank's head reads among those it has is one of the head's own.
            copy = rank * own_keys + n // (split.own // own_keys)
            assert copy // copies == head // groups


def test_bytes_of_a_published_layer() -> None:
    # 64 query and 8 key heads of 128 in bfloat16; 8 ranks of 16,384 tokens of one document.
    layout, heads = cut_batch((8 * 16384,), 8, "contiguous"), Heads(64, 8, 128, 128)
    mib = 2**20
    forward = {
        method: softmax_volume(Exchange(method), layout, 0, heads, 2).forward / mib  # type: ignore[arg-type]
        for method in ("ulysses", "all_gather", "ring")
    }
    row = 2 * 8 * 128 * 2
    assert forward["all_gather"] == 7 * 16384 * row / mib
    # Nobody sees the last rank's tokens, so six ranks' rows pass rank 0.
    assert forward["ring"] == 6 * 16384 * row / mib
    assert forward["ulysses"] == 16384 * (2 * 64 + 2 * 8) * 128 * 2 * 7 / 8 / mib
    window = softmax_volume(Exchange("window"), layout, 3, heads, 2, window=128)
    assert window == (127 * row, 127 * 3 * row)
    double = softmax_volume(Exchange("double_ring", 4), layout, 0, heads, 2)
    # Sums of the second inner ring's rows go home in it, and then to their own ring.
    assert double.forward / mib == forward["ring"]
    assert softmax_volume(Exchange("ring"), layout, 0, heads, 2).backward < double.backward


def gpt_oss_layers() -> list[Any]:
    return TitanModel(family="gpt_oss", flavor="debugmodel").build_spec().model.layers


def test_layers_keep_their_windows() -> None:
    layers = gpt_oss_layers()[:2]
    found = [share_attention(layer.attention, Exchange("ring")) for layer in layers]
    assert [config.inner_attention.window for config in found] == [128, None]
    assert [config.inner_attention.build().exchange.method for config in found] == [
        "window", "ring",
    ]  # fmt: skip
    for layer, config in zip(layers, found, strict=True):
        assert isinstance(config, BaseAttention.Config)
        assert config.rope == layer.attention.rope
        assert not isinstance(layer.attention.inner_attention, SharedAttention.Config)


@pytest.mark.parametrize("direct", [False, True])
def test_layers_choose_how_kernels_run_backward(direct: bool) -> None:
    config = share_attention(gpt_oss_layers()[1].attention, Exchange("ring"), direct)
    inner = config.inner_attention.build()
    kernel = kernel_on(torch.device("cuda"), inner.direct)
    assert isinstance(kernel, FlexKernel) and kernel.direct == direct
    assert isinstance(kernel_on(torch.device("cpu"), direct), PlainKernel)


def test_keys_are_not_gathered_before_the_exchange() -> None:
    model = TitanModel(family="gpt_oss", flavor="debugmodel").build_spec().model
    set_gpt_oss_sharding_config(model, enable_sp=False, enable_ep=False)
    stock = model.layers[0].attention.inner_attention.sharding_config
    ours = sequence_stays_cut(stock)
    assert stock.in_src_shardings != stock.in_dst_shardings
    assert ours.in_src_shardings == ours.in_dst_shardings == stock.in_src_shardings
    assert ours.local_map.in_grad_placements == (ours.out_src_shardings,) * 3


def test_what_attention_cannot_honour_is_refused() -> None:
    attention = SharedAttention.Config(method="ring").build()
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(TypeError, match="attention_masks: NoneType; .* takes a Share"):
        attention(q, q, q, attention_masks=None)
    with pytest.raises(TypeError, match="the model passes is_causal"):
        attention(q, q, q, attention_masks=None, is_causal=True)
    with pytest.raises(ValueError, match="method: 'rings'; legal: ulysses, all_gather, ring"):
        SharedAttention.Config(method="rings").build()  # type: ignore[arg-type]
