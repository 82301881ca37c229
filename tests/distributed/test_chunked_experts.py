"""Ranks that exchange tokens chunk by chunk compute what one rank with all experts computes."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.spmd_types import set_spmd_meshes
from torchtitan.models.common.moe import RoutedExperts

from components.expert_dispatch.experts import ChunkedRoutedExperts, chunked_experts
from components.expert_dispatch.partition import DisagreementError
from components.recompute.layer import RecomputedLayer
from components.titan.combine import keep_outputs
from components.titan.dispatch import gloo
from kernels.combine import rounded_sum
from tests.distributed.spawn import run_ranks
from tests.unit.experts_support import (
    EXPERTS,
    TOP_K,
    build,
    config_of,
    gradients,
    routing,
    rows,
    run,
)

pytestmark = pytest.mark.distributed

CHUNK = 8
DTYPES = {"glm": torch.float64, "moe": torch.bfloat16}


def one_expert(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return routing(tokens, seed)[0], torch.full((tokens, TOP_K), EXPERTS - 1)


ROUTINGS: dict[str, Callable] = {
    "spread": routing,
    "duplicates": partial(routing, duplicates=True),
    "first half": partial(routing, experts=EXPERTS // 2),
    "one expert": one_expert,
}


CASES = {
    2: [
        ("glm", "strided", (21, 5), "spread"),
        ("glm", "strided", (20, 0), "one expert"),
        ("glm", "contiguous", (1, 17), "duplicates"),
        ("moe", "strided", (17, 3), "first half"),
    ],
    4: [
        ("glm", "strided", (21, 0, 5, 3), "duplicates"),
        ("glm", "contiguous", (1, 0, 0, 20), "one expert"),
        ("moe", "strided", (9, 2, 0, 20), "first half"),
    ],
}
"""By ranks: experts, membership, tokens of each rank (some fewer than chunks, or none), routing."""


def on_ranks(
    family: str, membership: str, chunk_tokens: int | None = CHUNK, trimmed: bool = False
) -> RoutedExperts:
    """This rank's share of the experts, with the same weights as ``build`` gives to one rank;
    trimmed: summed without a float32 copy."""
    config = config_of(family)
    if trimmed:
        config.token_dispatcher = keep_outputs(config.token_dispatcher)
    config.token_dispatcher = gloo(config.token_dispatcher)
    if chunk_tokens is not None:
        config = chunked_experts(
            config, chunk_tokens=chunk_tokens, max_chunks=64, membership=membership
        )
    experts = build(config, DTYPES[family])
    for parameter in experts.parameters():
        parameter.data = parameter.data[mine()].clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
    experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    assert isinstance(experts, ChunkedRoutedExperts) == (chunk_tokens is not None)
    return experts


def mine() -> slice:
    """The experts of this rank."""
    each = EXPERTS // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, limit: float, what: str) -> None:
    assert found.shape == wanted.shape, what
    error = (found - wanted).norm() / wanted.norm().clamp(min=1e-12)
    assert error <= limit, f"{what}: {error:.2e}"


def compare(family: str, membership: str, lengths: tuple[int, ...], draw: Callable) -> None:
    """One case, on this rank: its rows are its own, experts get gradients from all ranks."""
    experts, whole = on_ranks(family, membership), build(config_of(family), DTYPES[family])
    exact, rounding = (1e-12, 1e-12) if family == "glm" else (1e-6, 6e-3)
    given = [(rows(n, rank, DTYPES[family]), *draw(n, rank)) for rank, n in enumerate(lengths)]
    out, found = gradients(experts, *given[dist.get_rank()])
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in whole.parameters()]
    for rank, theirs in enumerate(given):
        expected, wanted = gradients(whole, *theirs)
        for total, parameter in zip(sums, whole.parameters(), strict=True):
            total += parameter.grad
        if rank == dist.get_rank():
            assert_close(out, expected, exact, "output")
            for name in ("x", "weights"):
                assert_close(found[name], wanted[name], exact, name)
    for parameter, total in zip(experts.parameters(), sums, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad.double(), total[mine()], rounding, "parameters")


class Recorded(nn.Module):
    """A layer that writes down how often it asks for the number of chunks."""

    def __init__(self, experts: RoutedExperts, *routing: torch.Tensor) -> None:
        super().__init__()
        self.experts, self.routing = experts, routing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(self.experts, x, *self.routing)


def compare_recomputed() -> None:
    """A recomputed layer whose ranks have different lengths; chunks are agreed upon once."""
    import components.expert_dispatch.experts as module

    original, asked = module.agree, []
    module.agree = lambda *args: (asked.append(1), original(*args))[1]
    experts, n = on_ranks("glm", "strided"), (20, 3, 0, 9)[dist.get_rank()]
    x, given = rows(n, 3), routing(n, 3)
    expected, wanted = gradients(build(config_of("glm")), x, *given)
    x = x.clone().requires_grad_()
    out = RecomputedLayer(Recorded(experts, *given))(x)
    out.backward(rows(n, 7))
    assert_close(out, expected, 1e-12, "recomputed output")
    assert_close(x.grad, wanted["x"], 1e-12, "recomputed x")
    assert asked == [1]
    module.agree = original


def compare_combine() -> None:
    """torchtitan's experts, their outputs summed without a float32 copy: the same bits, also where
    a rank has no tokens; only sums over a row, for the weights, may be taken in another order."""
    n = (20, 0, 3, 9)[dist.get_rank()]
    given = rows(n, 3, torch.bfloat16), *routing(n, 3, duplicates=True)
    summed: list[type] = []

    def watched(outputs: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        summed.append(type(outputs))
        return rounded_sum(outputs, *others)

    for chunk_tokens in (None, CHUNK):
        both = [on_ranks("moe", "strided", chunk_tokens, trimmed) for trimmed in (False, True)]
        both[1].token_dispatcher.kernel = watched
        (expected, wanted), (out, found) = (gradients(experts, *given) for experts in both)
        assert torch.equal(out, expected)
        assert_close(found.pop("weights"), wanted["weights"], 1e-6, "weights")
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in found.items())
    # Never a tensor that is still on its way.
    assert summed and set(summed) == {torch.Tensor}


def compare_refusal() -> None:
    """Ranks with different settings all learn who has which."""
    experts = on_ranks("glm", "strided", chunk_tokens=CHUNK + dist.get_rank() % 2)
    with pytest.raises(DisagreementError, match="different settings") as raised:
        run(experts, rows(9, 0), *routing(9))
    assert re.search(r"rank.* 0.*: chunk_tokens 8", str(raised.value))
    assert re.search(r"rank.* 1.*: chunk_tokens 9", str(raised.value))


def all_comparisons() -> None:
    dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]))
    for family, membership, lengths, name in CASES[dist.get_world_size()]:
        compare(family, membership, lengths, ROUTINGS[name])
    compare_recomputed()
    compare_combine()
    compare_refusal()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_outputs_and_every_gradient_are_those_of_one_rank(ranks: int, tmp_path: Path) -> None:
    run_ranks(all_comparisons, ranks, tmp_path)
