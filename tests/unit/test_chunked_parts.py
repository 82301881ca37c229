"""Mixers and SwiGLU in chunks: the same results, and never more than one chunk's graph."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from components.models.glm_flash import indexer, kda, mla
from components.models.glm_flash.chunked.function import Part
from components.models.glm_flash.chunked.pieces import Piece, cut
from components.models.glm_flash.experts import ClampedFeedForward
from components.recompute.layer import RecomputedLayer
from components.titan.memory.storages import TensorWatch
from tests.unit.chunked_support import (
    KINDS,
    build,
    config_of,
    counted,
    draw,
    gradients,
    pair,
    runner,
)

DOCUMENTS = {
    "one": (200,),
    "ragged": (1, 3, 60, 70, 5, 2, 65, 1, 40, 9),
    "at cuts": (64, 128, 8),
    "tiny": (1, 2, 3, 4, 5) * 12,
    "short": (40,),
}


def assert_same(
    name: str, found: torch.Tensor | None, wanted: torch.Tensor | None, share: float, least: float
) -> None:
    """Within ``share`` of the largest element, or of ``least`` if that is larger."""
    if wanted is None or found is None:
        assert found is wanted, name
        return
    error, size = (found - wanted).abs().max().item(), wanted.abs().max().item()
    assert error <= share * max(size, least), f"{name}: off by {error:.1e} of {size:.1e}"


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("chunk_tokens", [64, 24, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient_equal_the_whole(
    kind: str, chunk_tokens: int, documents: str
) -> None:
    lengths = DOCUMENTS[documents]
    whole, chunked = pair(kind, chunk_tokens)
    x = draw(sum(lengths))
    out, grads = gradients(chunked, runner(chunked, lengths), x)
    wanted, wanted_grads = gradients(whole, runner(whole, lengths), x)
    assert_same("output", out, wanted, 1e-12, 1)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        assert_same(name, grad, wanted_grads[name], 1e-12, 1)
        assert (grad is None) == ("indexer" in name), name


@pytest.mark.parametrize("kind", KINDS)
def test_float32_loses_no_more_than_its_rounding(kind: str) -> None:
    lengths = DOCUMENTS["ragged"]
    exact, _ = pair(kind, 64)
    whole, chunked = pair(kind, 64, torch.float32)
    x = draw(sum(lengths), dtype=torch.float32)
    wanted, wanted_grads = gradients(exact, runner(exact, lengths), x.double())
    results = [gradients(part, runner(part, lengths), x) for part in (whole, chunked)]
    for name, reference in {"output": wanted, **wanted_grads}.items():
        if reference is None:
            continue
        plain, cut_up = (
            (out if name == "output" else grads[name]).double() for out, grads in results
        )
        own = (plain - reference).norm().item()
        error = (cut_up - reference).norm().item()
        assert error <= 2 * own + 1e-6 * max(1, reference.norm().item()), name


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_weights_in_low_precision_are_summed_in_full(kind: str) -> None:
    """40 chunks: rounding every partial sum would lose several times more than one rounding."""
    lengths = (600, 40)
    exact, _ = pair(kind, 16)
    whole, chunked = pair(kind, 16)
    for part in (exact, whole, chunked):
        for parameter in part.parameters():
            parameter.data = parameter.data.bfloat16().double()
    x = draw(sum(lengths)).bfloat16()
    wanted = gradients(exact, runner(exact, lengths), x.double())[1]
    errors = []
    for part in (whole, chunked):
        lower(part)
        found = gradients(part, runner(part, lengths), x)[1]
        errors.append(
            {
                n: (found[n].double() - g).norm() / g.norm()
                for n, g in wanted.items()
                if g is not None
            }
        )
        assert all(found[n].dtype == p.dtype for n, p in part.named_parameters() if p.requires_grad)
    for name, error in errors[1].items():
        assert error < 1.5 * errors[0][name] + 1e-3, f"{name}: {error:.1e}, {errors[0][name]:.1e}"


def test_queries_meet_the_latent_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the gradients that chunks have for it are summed in float32, and rounded once."""
    chunked, seen = build(config_of("dsa", 64)), []
    lower(chunked)
    original = mla.sparse_mla

    def spy(q: torch.Tensor, latent: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((q.dtype, latent.dtype, len(latent)))
        return original(q, latent, *args, **kwargs)

    monkeypatch.setattr(mla, "sparse_mla", spy)
    out, grads = gradients(chunked, runner(chunked, (130, 70)), draw(200).bfloat16())
    assert set(seen) == {(torch.bfloat16, torch.float32, 200)}
    assert out.dtype == grads["kv_a_proj.weight"].dtype == torch.bfloat16


def lower(part: nn.Module) -> None:
    """bfloat16, but for what stays float32 in mixed precision."""
    for module in part.modules():
        full = isinstance(module, kda.KdaCore | kda.ShortConv)
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.float32 if full else torch.bfloat16)


CORES = {
    "kda": (kda.KdaCore, "piece_kernel"),
    "dsa": (mla, "sparse_mla"),
    "feed_forward": (ClampedFeedForward, "forward"),
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_runs_twice_also_in_a_recomputed_layer(kind: str, recomputed: bool) -> None:
    """Forward without a graph, first to last; backward with one, last to first."""
    lengths = (130, 70)
    whole, chunked = pair(kind, 64)
    plain = Wrapped(runner(chunked, lengths))
    layer = RecomputedLayer(plain) if recomputed else plain
    with counted(*CORES[kind]) as calls:
        found = gradients(chunked, layer, draw(200))[1]
    assert calls.rows == [64, 64, 64, 8, 8, 64, 64, 64]
    assert calls.with_graph == [False] * 4 + [True] * 4
    once = gradients(chunked, plain, draw(200))[1]
    wanted = gradients(whole, Wrapped(runner(whole, lengths)), draw(200))[1]
    for name, grad in found.items():
        assert_same(name, grad, wanted[name], 1e-12, 1)
        assert grad is None or torch.equal(grad, once[name]), name


class Wrapped(nn.Module):
    """A layer around a part, with something before and after it."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.run(hidden.sin()).cos()


@pytest.mark.parametrize("recomputed", [False, True])
def test_pools_are_chosen_once(recomputed: bool) -> None:
    chunked = build(config_of("dsa", 64))
    run = runner(chunked, (130, 70))
    layer = RecomputedLayer(Wrapped(run)) if recomputed else run
    with counted(indexer, "select_pools") as calls:
        gradients(chunked, layer, draw(200))
    assert calls.rows == [64, 64, 64, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_pools_and_states_kept_are_all_but_the_input(kind: str) -> None:
    lengths = (130, 70)
    chunked = build(config_of(kind, 64))
    x, kept = draw(200).requires_grad_(), []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = runner(chunked, lengths)(x)
    own = [t for t in kept if t.data_ptr() == x.data_ptr()]
    others = [(tuple(t.shape), t.dtype) for t in kept if t.data_ptr() != x.data_ptr()]
    assert len(own) == 1
    # Three cuts, all of them inside a document: 64 and 128 in the first, 192 in the second.
    extra = {
        "kda": [((3, 2, 8, 8), torch.float64)],
        "dsa": [((200, 4), torch.int32)],
        "feed_forward": [],
    }
    assert others == extra[kind]
    out.sum().backward()


class Held:
    """A tensor that a graph keeps for its backward."""

    alive = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Held.alive += 1

    def __del__(self) -> None:
        Held.alive -= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunks_graph_is_gone_before_the_next_begins(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunked = build(config_of(kind, 64))
    out = runner(chunked, (130, 70))(draw(200).requires_grad_())
    alive: list[tuple[int, int]] = []
    for owner in Part.__subclasses__():
        monkeypatch.setattr(owner, "run", watched(owner.run, alive))
    out.sum().backward()
    assert len(alive) == 4
    assert [before for before, _ in alive] == [0] * 4
    assert all(after > 0 for _, after in alive)
    assert Held.alive == 0


def watched(run: Any, alive: list[tuple[int, int]]) -> Any:
    """The method, writing down how many tensors chunks' graphs hold before and after it."""

    def call(*args: Any) -> Any:
        before = Held.alive
        with saved_tensors_hooks(Held, lambda held: held.tensor):
            result = run(*args)
        alive.append((before, Held.alive))
        return result

    return call


def peak(part: nn.Module, run: Any, x: torch.Tensor) -> int:
    """Most bytes alive at once in backward, of tensors that backward makes."""
    out = run(x.requires_grad_())
    storages: dict[int, tuple[StorageWeakRef, int]] = {}
    most = 0

    def made(tensor: torch.Tensor, name: str) -> None:
        nonlocal most
        storage = tensor.untyped_storage()
        for key in [k for k, (ref, _) in storages.items() if ref.expired()]:
            del storages[key]
        storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        most = max(most, sum(size for _, size in storages.values()))

    with TensorWatch(made):
        out.backward(torch.ones_like(out))
    return most


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_backward_falls_with_the_chunk(kind: str) -> None:
    tokens, peaks = 1024, []
    for chunk_tokens in (1024, 256, 64):
        part = build(config_of(kind, chunk_tokens), torch.float32)
        peaks.append(peak(part, runner(part, (tokens,)), draw(tokens, dtype=torch.float32)))
    assert peaks[0] > 1.7 * peaks[1] and peaks[1] > peaks[2], peaks


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_nothing_before_them(kind: str) -> None:
    chunked = build(config_of(kind, 64), torch.float32)
    run, x, other = runner(chunked, (200,)), *(draw(200, s, torch.float32) for s in (0, 1))
    with torch.no_grad():
        out = run(x)
        for end in (1, 3, 63, 64, 65, 127, 128, 130, 199):
            changed = run(torch.cat([x[:end], other[end:]]))
            assert torch.equal(changed[:end], out[:end])
            assert not torch.equal(changed[end:], out[end:])


@pytest.mark.parametrize("kind", ["kda", "dsa"])
def test_nothing_crosses_from_document_to_document(kind: str) -> None:
    lengths, watched_rows = (37, 110, 53), slice(37, 147)
    chunked = build(config_of(kind, 64), torch.float32)
    run, x = runner(chunked, lengths), draw(200, dtype=torch.float32).requires_grad_()
    run(x)[watched_rows].square().sum().backward()
    assert x.grad is not None
    assert not x.grad[:37].any() and not x.grad[147:].any()
    assert x.grad[watched_rows].any(dim=1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_gets_no_gradient(kind: str) -> None:
    lengths = (100, 30)
    whole, chunked = pair(kind, 64)
    for part in (whole, chunked):
        for parameter in part.parameters():
            parameter.requires_grad_(False)
    results = [gradients(part, runner(part, lengths), draw(130))[1] for part in (whole, chunked)]
    assert_same("x", results[1].pop("x"), results[0].pop("x"), 1e-12, 1)
    assert all(grad is None for grad in results[1].values())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_train_where_the_input_needs_no_gradient(kind: str) -> None:
    lengths, x = (100, 30), draw(130)
    found = []
    for part in pair(kind, 64):
        runner(part, lengths)(x).sum().backward()
        found.append({n: p.grad for n, p in part.named_parameters()})
    for name, grad in found[1].items():
        assert_same(name, grad, found[0][name], 1e-12, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_the_result_is_the_same(kind: str) -> None:
    chunked = build(config_of(kind, 64))
    run, x = runner(chunked, (130, 70)), draw(200)
    expected = run(x.clone().requires_grad_()).detach()
    with torch.no_grad():
        assert torch.equal(run(x), expected)
    with torch.inference_mode():
        assert torch.equal(run(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_passes_add_up_and_hooks_see_each_once(kind: str) -> None:
    lengths = (100, 30)
    chunked = build(config_of(kind, 64))
    fired: dict[str, int] = {}
    for name, parameter in chunked.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: fired.update({name: fired.get(name, 0) + 1})
            )
    run = runner(chunked, lengths)
    singles = [gradients(chunked, run, draw(130, seed))[1] for seed in (0, 5)]
    fired.clear()
    chunked.zero_grad()
    for seed in (0, 5):
        run(draw(130, seed)).backward(draw(130, 1))
    assert fired and set(fired.values()) == {2}
    for name, parameter in chunked.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, singles[0][name] + singles[1][name]), name


@pytest.mark.parametrize(
    ("lengths", "size", "pieces"),
    [
        ((5,), 8, [Piece(0, 5, (5,))]),
        ((8,), 8, [Piece(0, 8, (8,))]),
        ((9,), 8, [Piece(0, 8, (8,), carries=True), Piece(8, 9, (1,), 8)]),
        ((3, 5, 2), 8, [Piece(0, 8, (3, 5)), Piece(8, 10, (2,))]),
        ((3, 20, 1), 8, [Piece(0, 8, (3, 5), carries=True), Piece(8, 16, (8,), 5, True),
                         Piece(16, 24, (7, 1), 13)]),
    ],
)  # fmt: skip
def test_cuts_are_counted_through_the_batch(
    lengths: tuple[int, ...], size: int, pieces: list[Piece]
) -> None:
    assert list(cut(lengths, size)) == pieces
