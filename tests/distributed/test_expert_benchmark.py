"""The benchmark of expert dispatch and its peer: the published LLEP, against plain experts."""

import os
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.moe import RoutedExperts

import tests.benchmarks.expert_variants as variants
from components.expert_dispatch.plan import imbalance, plan
from components.recompute.layer import RecomputedLayer
from components.titan.dispatch import gloo
from tests.benchmarks.expert_dispatch import measure
from tests.benchmarks.expert_report import of_profile
from tests.benchmarks.expert_shapes import SIZES
from tests.benchmarks.fakes import QuickProbe, machine
from tests.benchmarks.published_llep import PublishedLlepExperts, published_llep
from tests.benchmarks.ranks import Progress
from tests.distributed.spawn import run_ranks
from tests.unit.experts_support import EXPERTS, TOP_K, build, config_of, gradients, routing, rows

pytestmark = pytest.mark.distributed

RANKS = 2


def one_expert(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return routing(tokens, seed)[0], torch.full((tokens, TOP_K), EXPERTS - 1)


CASES = [
    ((21, 5), routing),
    ((17, 2), partial(routing, duplicates=True, experts=3)),
    ((20, 0), one_expert),
    ((0, 0), routing),
]
"""Tokens of each rank, routing."""


def on_ranks(mesh: DeviceMesh, published: bool) -> RoutedExperts:
    """This rank's half of the experts, in float64."""
    config = config_of("glm")
    config.token_dispatcher = gloo(config.token_dispatcher)
    experts = build(published_llep(config, minimum_rows=1) if published else config)
    each = EXPERTS // RANKS
    mine = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    for parameter in experts.parameters():
        parameter.data = parameter.data[mine].clone()
    experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    assert isinstance(experts, PublishedLlepExperts) == published
    return experts


def compare_published(mesh: DeviceMesh) -> None:
    """Outputs and all gradients to 1e-12 in float64, also in a recomputed layer."""
    for lengths, draw in CASES:
        n, rank = lengths[dist.get_rank()], dist.get_rank()
        x, (weights, ids) = rows(n, rank), draw(n, rank)
        loads = torch.bincount(
            torch.cat([draw(t, r)[1].flatten() for r, t in enumerate(lengths)]), minlength=EXPERTS
        )
        moved = plan(loads, RANKS, minimum_rows=1).transfers
        assert bool(moved) == (imbalance(loads, RANKS) > 1)
        expected, wanted = gradients(on_ranks(mesh, False), x, weights, ids)
        out, found = gradients(on_ranks(mesh, True), x, weights, ids)
        assert_close({**found, "out": out}, {**wanted, "out": expected}, f"{lengths}")
        again = recomputed(on_ranks(mesh, True), x, weights, ids)
        assert_close(again, wanted, f"{lengths} recomputed")


def assert_close(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    for name, value in wanted.items():
        error = (found[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert error <= 1e-12, f"{name} of {what}: {error:.1e}"


class Layer(nn.Module):
    def __init__(self, experts: RoutedExperts, *given: torch.Tensor) -> None:
        super().__init__()
        self.experts, self.given = experts, given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.given
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        return self.experts(x[None], weights[None], ids[None], counts)[0]


def recomputed(
    experts: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = RecomputedLayer(Layer(experts, weights, ids))(x)
    out.backward(rows(len(x), 7))
    named = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"x": x.grad, "weights": weights.grad, **named}


def measured(limit: float | None = None, **options: Any) -> dict[str, Any]:
    """The figures of a profile."""
    given = {"profiles": ["80/16"], "variants": None, "repeats": 3, "warmup": 1, "seed": 0}
    given |= {"memory_limit": None}
    figures: list[dict[str, Any]] = []
    measure(
        SIZES["tiny"], QuickProbe(), machine(), Namespace(**(given | options)),
        Progress(time.monotonic(), limit),
        figures.append,
    )  # fmt: skip
    return figures[0] if figures else {}


def check_benchmark() -> None:
    figures = measured()
    assert [each["name"] for each in figures["variants"]] == [v.name for v in variants.VARIANTS]
    for figure in figures["variants"]:
        assert figure["reason"] == "" and 0 <= max(figure["errors"].values()) < 1e-2
        assert len(figure["forward_ms"]) == len(figure["both_ms"]) == 3
        if figure["role"] == "ours" and figure["name"] != "chunked":
            assert figure["realised_receive_peak"] == figure["traffic"]["receive_peak"]
    by_name = {figure["name"]: figure["traffic"] for figure in figures["variants"]}
    assert by_name["standard"]["after"] > 1.5 > 1.1 > by_name["llep"]["after"]
    assert by_name["pipelined"]["receive_peak"] < by_name["llep"]["receive_peak"] / 2
    assert "| pipelined | ours |" in of_profile(figures)


def check_left_out() -> None:
    """What an estimate says would not fit, what is wrong, and what there is no time for."""
    tight = measured(memory_limit=200 / 2**20, variants=["standard", "pipelined"])
    whole, chunked = tight["variants"]
    assert whole["reason"].startswith("out of memory") and not whole["both_ms"]
    assert chunked["reason"] == "" and len(chunked["both_ms"]) == 3
    assert "| standard | peer | | | | | | | out of memory: an estimated" in of_profile(tight)

    original = variants.VARIANTS
    scaled = replace(variants.REFERENCE, name="half", role="ours", change=halved)
    variants.VARIANTS = (scaled,)
    try:
        (wrong,) = measured(variants=["half"])["variants"]
    finally:
        variants.VARIANTS = original
    assert "out" in wrong["reason"] and wrong["reason"].startswith("wrong") and not wrong["both_ms"]

    assert measured(limit=0.0) == {}
    with pytest.raises(ValueError, match="--variants quick: legal are standard"):
        measured(variants=["quick"])
    with pytest.raises(ValueError, match="80/200"):
        measured(profiles=["80/200"])


class HalvedExperts(RoutedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return super().forward(*args) / 2


def halved(config: RoutedExperts.Config, shape: Any) -> RoutedExperts.Config:
    return HalvedExperts.Config(
        inner_experts=config.inner_experts, token_dispatcher=config.token_dispatcher
    )


def everything() -> None:
    dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]))
    check_benchmark()
    check_left_out()
    compare_published(variants.mesh_of("cpu"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_benchmark_measures_every_variant_and_its_peer_is_exact(tmp_path: Path) -> None:
    run_ranks(everything, RANKS, tmp_path)
