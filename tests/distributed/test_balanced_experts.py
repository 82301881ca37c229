"""Experts whose rows a plan spreads over ranks compute what plain expert parallelism computes."""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.models.common.moe import RoutedExperts

import components.expert_dispatch.balanced as balanced
import components.expert_dispatch.balanced_experts as module
import components.expert_dispatch.last_product as last_product
import components.expert_dispatch.travel as travel
import components.expert_dispatch.weights as weights_module
import components.models.glm_flash.experts as glm_experts
import components.titan.experts as parts
from components.expert_dispatch.balanced_experts import BalancedRoutedExperts
from components.expert_dispatch.layer_pass import Surroundings
from components.expert_dispatch.layer_plan import LayerPlan
from components.recompute.layer import RecomputedLayer
from tests.distributed.balanced_checks import (
    check_disagreement,
    check_frozen,
    check_memory,
    check_questions,
)
from tests.distributed.balanced_support import (
    CHUNK,
    DTYPES,
    FIRST_HALF,
    Routing,
    assert_close,
    at_most,
    on_ranks,
    planned,
    row_by_row,
    row_by_row_back,
)
from tests.distributed.spawn import run_ranks
from tests.swaps import counted, kept, replaced
from tests.unit.experts_support import (
    DIM,
    EXPERTS,
    TOP_K,
    gradients,
    routing,
    rows,
    run,
)

pytestmark = pytest.mark.distributed


def one_expert(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return routing(tokens, seed)[0], torch.full((tokens, TOP_K), EXPERTS - 1)


SPREAD: Routing = routing
DUPLICATES: Routing = partial(routing, duplicates=True)

CASES: dict[int, list[tuple[str, tuple[int, ...], Routing]]] = {
    2: [
        ("glm", (21, 5), SPREAD),
        ("glm", (20, 0), one_expert),
        ("glm", (17, 1), partial(routing, duplicates=True, experts=3)),
        ("glm", (0, 0), SPREAD),
        ("moe", (17, 3), FIRST_HALF),
        ("moe", (0, 30), one_expert),
    ],
    4: [
        ("glm", (21, 0, 5, 3), DUPLICATES),
        ("glm", (1, 0, 0, 20), one_expert),
        ("glm", (9, 30, 2, 17), FIRST_HALF),
        ("moe", (9, 2, 0, 20), FIRST_HALF),
        ("moe", (3, 12, 1, 8), one_expert),
    ],
}
"""By ranks: experts, tokens of each rank (some fewer than chunks, or none), routing."""

FORMS: list[dict[str, Any]] = [
    {},
    {"chunk_tokens": CHUNK, "max_chunks": 64},
    {"chunk_tokens": 3, "max_chunks": 64, "membership": "contiguous"},
]


def compare(family: str, lengths: tuple[int, ...], draw: Routing) -> None:
    """One case in every form, on this rank, against experts that stay where they live."""
    rank, dtype = dist.get_rank(), DTYPES[family]
    x, given = rows(lengths[rank], rank, dtype), draw(lengths[rank], rank)
    expected, wanted = gradients(on_ranks(family), x, *given)
    for form in FORMS:
        experts = planned(family, **form)
        plans: list[LayerPlan] = []
        with kept(BalancedRoutedExperts, "_plan", plans):
            out, found = gradients(experts, x, *given)
        what = f"{family} {lengths} {form}"
        assert found.keys() == wanted.keys()
        assert_close(out, expected, 1e-12 if family == "glm" else 4e-3, f"output of {what}")
        for name, gradient in wanted.items():
            # bfloat16: both round a few times on the way, at different places.
            limit = 1e-12 if family == "glm" else 1.2e-2
            assert_close(found[name], gradient, limit, f"{name} of {what}")
        check_plan(plans[0], lengths)
        copied = sum(parameter.nbytes for parameter in experts.parameters()) // EXPERTS
        sizes = DIM * x.itemsize, copied * len(lengths)
        assert experts.latest == plans[0].load(*sizes)


def check_plan(layer: LayerPlan, lengths: tuple[int, ...]) -> None:
    """Realised splits: Eq. 1 of arXiv 2609.14306, whole loads, and rows that really were moved."""
    assert layer.plan.ranks == len(lengths)
    chunks = len(layer.chunks)
    bound = len(lengths) * TOP_K * -(-max(lengths) // chunks)
    for chunk in layer.chunks:
        assert int(chunk.splits.sum(0).max()) <= bound
        assert torch.equal(chunk.rows.sum(0), chunk.plan.rows)
    assert sum(int(chunk.rows.sum()) for chunk in layer.chunks) == TOP_K * sum(lengths)
    mean = TOP_K * sum(lengths) / len(lengths)
    pieces = len(layer.plan.rank)
    received = sum(chunk.splits.sum(0) for chunk in layer.chunks)
    assert int(received.max()) <= mean + 1 + (pieces if chunks > 1 else 0)


def compare_bits() -> None:
    """However many chunks, and wherever rows go: outputs and their gradients are the same bits."""
    rank = dist.get_rank()
    n = (20, 3, 0, 9)[rank]
    x, given = rows(n, rank, torch.bfloat16), FIRST_HALF(n, rank)
    with ExitStack() as stack:
        for owner in (glm_experts, parts):
            stack.enter_context(replaced(owner, "grouped_mm", row_by_row))
        stack.enter_context(replaced(last_product, "grouped_mm_by_columns", row_by_row_back))
        expected, _ = gradients(on_ranks("glm", torch.bfloat16), x, *given)
        found = [gradients(planned("glm", torch.bfloat16, **form), x, *given) for form in FORMS]
    for out, grads in found:
        assert torch.equal(out, expected)
        for name in ("x", "weights"):
            assert torch.equal(grads[name], found[0][1][name]), name


def compare_unmoved() -> None:
    """Below the threshold, with one chunk, nothing moves: outputs, and gradients of the products
    that backward does not take apart, are the plain ones to the bit."""
    for family in DTYPES:
        x, given = rows(19, dist.get_rank(), DTYPES[family]), FIRST_HALF(19, dist.get_rank())
        expected, wanted = gradients(on_ranks(family), x, *given)
        experts = planned(family, threshold=100.0)
        out, found = gradients(experts, x, *given)
        assert experts.latest is not None and experts.latest.before == experts.latest.after
        assert experts.latest.copies_sent == 0
        assert torch.equal(out, expected)
        last = "inner_experts.w2_EDF"
        assert torch.equal(found[last], wanted[last])


class Layer(nn.Module):
    def __init__(self, experts: RoutedExperts, *given: torch.Tensor) -> None:
        super().__init__()
        self.experts, self.given = experts, given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(self.experts, x, *self.given)


def compare_recomputed(kept_chunks: int) -> None:
    """A recomputed layer asks nobody again, runs no forward again, and computes the same."""
    n = (20, 3, 0, 9)[dist.get_rank()]
    x, given = rows(n, 3), FIRST_HALF(n, 3)
    expected, wanted = gradients(on_ranks("glm"), x, *given)
    experts = planned("glm", chunk_tokens=CHUNK, max_chunks=64, kept_chunks=kept_chunks)
    calls: list[str] = []
    watched = (module, "agree"), (module, "gather_counts"), (balanced, "_forward")
    with ExitStack() as stack:
        for owner, name in watched:
            stack.enter_context(counted(owner, name, calls))
        x = x.clone().requires_grad_()
        out = RecomputedLayer(Layer(experts, *given))(x)
        out.backward(rows(n, 7))
    assert_close(out, expected, 1e-12, "recomputed output")
    assert_close(x.grad, wanted["x"], 1e-12, "recomputed x")
    for name, parameter in experts.named_parameters():
        assert_close(parameter.grad, wanted[name], 1e-12, f"recomputed {name}")
    assert sorted(calls) == ["_forward", "agree", "gather_counts"]


def compare_ways() -> None:
    """In line or beside the computation, whatever is kept, however many gradients come home at a
    time, and with memory spoilt once it is let go of: the same bits, with one chunk, two (no chunk
    is both first and last) and more."""
    rank = dist.get_rank()
    n = (20, 3, 0, 9)[rank]
    ways: list[dict[str, Any]] = [{"beside": False}, {}, {"kept_chunks": 1}, {"kept_chunks": 9}]
    ways.append({"copies_home": 1})
    for family, chunks in (("glm", 1), ("glm", 2), ("moe", 3)):
        x, given = rows(n, rank, DTYPES[family]), FIRST_HALF(n, rank)
        experts = planned(family, chunk_tokens=1, max_chunks=chunks)
        found = [in_a_way(experts, x, *given, **way) for way in ways]
        assert experts.latest is not None and experts.latest.chunks == chunks
        rounded = planned(family, chunk_tokens=1, max_chunks=chunks, rounded_sums=True)
        check_rounded(gradients(rounded, x, *given), found[0], family == "moe" and chunks > 1)
        for way, (out, grads) in zip(ways, found, strict=True):
            assert torch.equal(out, found[0][0]), way
            for name, gradient in grads.items():
                assert torch.equal(gradient, found[0][1][name]), (name, way)


def check_rounded(found: Any, exact: Any, rounds: bool) -> None:
    """Rounding the sums of parameters' gradients between chunks changes nothing else."""
    assert torch.equal(found[0], exact[0])
    for name, gradient in exact[1].items():
        if rounds and "inner_experts" in name:
            assert_close(found[1][name], gradient, 4e-3, name)
        else:
            assert torch.equal(found[1][name], gradient), name


def in_a_way(
    experts: BalancedRoutedExperts,
    *given: torch.Tensor,
    beside: bool = True,
    kept_chunks: int = 0,
    copies_home: int = EXPERTS,
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    experts.kept_chunks = kept_chunks
    original = weights_module.rounds
    few = lambda plan, copies: original(plan, min(copies, copies_home))  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(at_most(2 * copies_home))
        for owner, name, function in (
            (weights_module, "rounds", few),
            (module, "Surroundings", partial(Surroundings, beside=beside)),
            (travel, "let_go", lambda memory: memory.fill_(torch.nan)),
        ):
            stack.enter_context(replaced(owner, name, function))
        return gradients(experts, *given)


def compare_groups() -> None:
    """Two groups side by side, each with a plan of its own: ranks of one are not those of all."""
    rank = dist.get_rank()
    n = (20, 3, 2, 31)[rank]
    x, given = rows(n, rank), FIRST_HALF(n, rank)
    expected, wanted = gradients(on_ranks("glm", ranks=2), x, *given)
    experts = planned("glm", ranks=2, chunk_tokens=CHUNK, max_chunks=64)
    out, found = gradients(experts, x, *given)
    assert experts.latest is not None and experts.latest.before > experts.latest.after
    assert_close(out, expected, 1e-12, "output of a group")
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, 1e-12, f"{name} of a group")


def all_comparisons() -> None:
    dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]))
    for case in CASES[dist.get_world_size()]:
        compare(*case)
    compare_bits()
    compare_unmoved()
    compare_ways()
    for kept_chunks in (0, 2):
        compare_recomputed(kept_chunks)
    if dist.get_world_size() == 4:
        compare_groups()
    check_frozen()
    check_memory()
    check_disagreement()
    check_questions()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_outputs_and_every_gradient_are_those_of_plain_expert_parallelism(
    ranks: int, tmp_path: Path
) -> None:
    run_ranks(all_comparisons, ranks, tmp_path)
