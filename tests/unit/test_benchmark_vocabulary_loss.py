"""The benchmark case ``vocabulary_loss`` and its form for several ranks."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks import vocabulary_ring
from tests.benchmarks.case import Size
from tests.benchmarks.cases import vocabulary_loss
from tests.benchmarks.fakes import QuickProbe, machine
from tests.benchmarks.harness import Options, run_case
from tests.benchmarks.machine import Ceilings


def tiny(dtype: str) -> Size:
    return Size(shape={"N": 96, "H": 16, "V": 50}, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_variants_pass_their_gate(dtype: str) -> None:
    case = replace(vocabulary_loss.CASE, sizes={"small": tiny(dtype)})
    ceilings = Ceilings(matmul_tflops={dtype: 1.0}, memory_gbps=1.0)
    here = replace(machine(), ceilings=ceilings)
    options = Options(warmup=0, repeats=1)
    measured = run_case(case, "small", QuickProbe(), here, options, lambda probe: ceilings)
    ran = {result.variant.name for result in measured.results if result.timing is not None}
    assert {"fused_1024", "recomputed_4096", "plain_torch_4096", "materialised"} <= ran
    assert ("fused_2048_bf16_dw" in ran) == (dtype == "bfloat16")


@pytest.fixture
def ring_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


OPTIONS = Namespace(repeats=2, warmup=0, seed=0)


def table(figures: list[dict[str, Any]]) -> str:
    record = {
        "ranks": 2,
        "machine": {"name": "Acme X1", "facts": {}},
        "size": {"shape": {"N": 96}, "dtype": "float32"},
        "command": "torchrun",
        "date": "today",
        "floor": {"ms": 1.0, "arithmetic": "one"},
        "variants": figures,
    }
    return vocabulary_ring.markdown(record)


def test_ring_checks_and_times_every_schedule(ring_of_one: None) -> None:
    figures = vocabulary_ring.measure(tiny("float32"), QuickProbe(), OPTIONS)
    ours = [figure for figure in figures if figure["role"] == "ours"]
    assert {figure["name"] for figure in ours} > {"move_weights_4096", "move_activations_4096"}
    for figure in ours:
        assert figure["reason"] == "" and len(figure["times_ms"]) == 2
        assert max(figure["errors"].values()) < 1e-5 and figure["peak_bytes"] >= 0
    lines = table(figures).splitlines()
    assert sum(line.startswith("| fused_") for line in lines) == 3
    if any(figure["reason"] for figure in figures):
        assert "| liger | peer | | | | | | | not installed: needs liger_kernel |" in lines


def test_ring_does_not_time_a_wrong_result(
    ring_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_dx(operands: Any, rows: int) -> Any:
        return {**fused(operands, rows), "dX": torch.zeros_like(operands.hidden)}

    fused = vocabulary_ring._fused
    monkeypatch.setattr(vocabulary_ring, "_fused", without_dx)
    figures = {
        f["name"]: f for f in vocabulary_ring.measure(tiny("float32"), QuickProbe(), OPTIONS)
    }
    assert figures["fused_2048"]["reason"] == "wrong: dX"
    assert figures["fused_2048"]["times_ms"] == []
    assert "wrong: dX" in table(list(figures.values()))
