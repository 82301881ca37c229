"""The benchmark of context parallelism: it measures what is right, and says what is not."""

import os
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tests.benchmarks.context_variants as variants
from tests.benchmarks.context_parallel import measure, wrong
from tests.benchmarks.context_report import LEAST_RATIO, markdown, projections_over_hidden
from tests.benchmarks.context_shapes import MIXERS, SIZES
from tests.benchmarks.fakes import QuickProbe, machine
from tests.benchmarks.ranks import Progress
from tests.distributed.spawn import run_ranks
from tests.swaps import replaced

pytestmark = pytest.mark.distributed

RANKS = 2


def measured(limit: float | None = None, **changes: Any) -> list[dict[str, Any]]:
    """The figures of every mixer."""
    options = {"mixers": MIXERS, "without": [], "layout": "zigzag", "repeats": 2, "warmup": 0}
    figures: list[dict[str, Any]] = []
    measure(
        SIZES["tiny"], QuickProbe(), machine(), Namespace(**(options | {"seed": 0} | changes)),
        Progress(time.monotonic(), limit), figures.append,
    )  # fmt: skip
    return figures


def check_benchmark() -> None:
    """Every variant is right and timed; counted bytes are the formulas'."""
    found = measured()
    assert [figures["mixer"] for figures in found] == list(MIXERS)
    for figures in found:
        names = [v.name for v in variants.variants_of(figures["mixer"])]
        assert [v["name"] for v in figures["variants"]] == names and not wrong(figures)
        for v in figures["variants"]:
            assert v["reason"] == "" and max(v["errors"].values()) < 1e-5
            assert len(v["times_ms"]) == 2 and v["peak_bytes"] > 0
            assert v["sent"] == v["formula"]
            assert (sum(v["sent"].values()) == 0) == (v["name"] == "whole")
    kda, dsa, _ = found
    assert projections_over_hidden(kda)["forward"] > LEAST_RATIO and dsa["other_pools"] == 0
    assert [v["halo_bytes"] > 0 for v in kda["variants"]] == [False, False, False, True]
    check_table(found)
    (projections,) = (v for v in kda["variants"] if v["name"] == "projections")
    projections["sent"]["forward"] //= 2
    assert wrong(kda)


def check_table(found: list[dict[str, Any]]) -> None:
    record = {
        "ranks": RANKS, "machine": {"name": "Acme X1", "facts": {}}, "layout": "zigzag",
        "shape": {"tokens": 96, "dtype": "float32", "gate": (1, 2), "tolerance": 1e-4},
        "command": "torchrun", "date": "today", "mixers": found,
    }  # fmt: skip
    text = markdown(record)
    assert text.count("\n| whole | ") == 3 and "\n| double_ring_1 | " in text
    assert "Bytes of `projections` over those of `hidden`, counted: 2.5" in text


def check_left_out() -> None:
    """What is wrong, sends more than it should, is not asked for, or has no time left."""

    def halved(module: Any, x: torch.Tensor, share: Any) -> torch.Tensor:
        return variants.KDA_METHODS["hidden"](module, x, share) / 2

    right = variants.variants_of("kda")
    wrong_one = replace(right[1], name="half", run=halved)
    with replaced(variants, "variants_of", lambda mixer: (right[0], wrong_one)):
        (figures,) = measured(mixers=["kda"], repeats=1)
    assert wrong(figures) and figures["variants"][1]["times_ms"] == []
    assert figures["variants"][1]["reason"].startswith("wrong: out, dx, ")
    (figures,) = measured(mixers=["kda"], without=["projections", "state"], repeats=1)
    assert [v["reason"] for v in figures["variants"]] == ["", "", "left out", "left out"]
    assert not wrong(figures)
    mislabelled = replace(right[1], exchange="projections")
    with replaced(variants, "variants_of", lambda mixer: (right[0], mislabelled)):
        (figures,) = measured(mixers=["kda"], repeats=1)
    assert wrong(figures) and "the formula says" in figures["variants"][1]["reason"]
    assert measured(limit=0.0) == []


def everything() -> None:
    dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]))
    check_benchmark()
    check_left_out()
    dist.destroy_process_group()


@pytest.mark.slow
def test_benchmark_measures_every_method_and_refuses_wrong_ones(tmp_path: Path) -> None:
    run_ranks(everything, RANKS, tmp_path)
