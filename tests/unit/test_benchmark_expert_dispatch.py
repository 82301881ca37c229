"""The benchmark of expert dispatch: shapes, profiles, arithmetic beforehand, tables."""

from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks.expert_report import markdown, of_profile
from tests.benchmarks.expert_shapes import (
    SIZES,
    Traffic,
    estimated_peak,
    floors,
    profile_for,
    resident_bytes,
    traffic,
)
from tests.benchmarks.fakes import machine
from tests.benchmarks.machine import Ceilings

GIB = 2**30


def test_sizes_are_the_papers_with_its_chunks() -> None:
    assert {name: shape.chunks for name, shape in SIZES.items()} == {"32k": 3, "65k": 10, "tiny": 3}
    for shape in SIZES.values():
        assert shape.gate().chunks == shape.chunks and shape.gate().dim == shape.dim
        assert shape.dim % 8 == shape.hidden % 8 == 0


@pytest.mark.parametrize(
    ("text", "experts", "scaled"),
    [("balanced", 32, "balanced"), ("80/16", 32, "80/4"), ("50/4", 32, "50/1"),
     ("50/4", 8, "50/1"), ("95/16", 128, "95/16")],
)  # fmt: skip
def test_profiles_keep_the_share_of_hot_experts(text: str, experts: int, scaled: str) -> None:
    assert str(profile_for(text, experts)) == scaled


@pytest.mark.parametrize("text", ["80/129", "80/128", "hot"])
def test_profiles_that_the_paper_could_not_have_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        profile_for(text, 32)


def of(name: str, profile: str, *, planned: bool, chunks: int = 1) -> Traffic:
    shape = replace(SIZES[name], tokens=SIZES[name].tokens // 16)
    return traffic(
        shape, 2, profile_for(profile, 2 * shape.experts), planned=planned, chunks=chunks
    )


def test_traffic_under_a_hot_rank() -> None:
    routes = SIZES["65k"].routes // 16
    still, moved = of("65k", "80/16", planned=False), of("65k", "80/16", planned=True)
    # Rank 0 has the hot experts, and 12 of the 28 others.
    assert still.before == still.after == pytest.approx(2 * (0.8 + 0.2 * 12 / 28), abs=5e-3)
    assert still.receive_peak == still.rank_rows == pytest.approx(still.after * routes, abs=1)
    assert still.migrated == 0 and moved.migrated > 0
    assert moved.before == still.before and moved.after == pytest.approx(1, abs=1e-3)
    assert moved.rank_rows == pytest.approx(routes, abs=2)
    chunked = of("65k", "80/16", planned=True, chunks=10)
    assert chunked.chunks == 10 and chunked.receive_peak < routes / 10 + 64


def test_even_routing_moves_no_weights_and_half_of_the_rows() -> None:
    even = of("32k", "balanced", planned=True)
    routes = SIZES["32k"].routes // 16
    assert (even.before, even.after, even.migrated) == (1.0, 1.0, 0)
    assert even.wire_rows == routes // 2 and even.rank_rows == routes


def test_estimates_tell_what_fits() -> None:
    shape = SIZES["65k"]
    hot = traffic(shape, 2, profile_for("95/16", 32), planned=False, chunks=1)
    plain = estimated_peak(shape, hot, whole=True, rounded=False)
    assert 100 * GIB < plain < 139 * GIB
    # Sorting the coordinates of every element is what torchtitan's own sum does not get away with.
    assert estimated_peak(shape, hot, whole=True, rounded=True) > 250 * GIB
    planned = traffic(shape, 2, profile_for("95/16", 32), planned=True, chunks=10)
    chunked = estimated_peak(shape, planned, whole=False, rounded=False)
    assert resident_bytes(shape) < chunked < 25 * GIB


def test_floor_is_the_slower_of_products_and_wire() -> None:
    shape = SIZES["32k"]
    moved = traffic(shape, 2, profile_for("balanced", 32), planned=True, chunks=1)
    flops = 6 * 32_768 * 4 * 4096 * 4096
    fast = replace(machine(), ceilings=Ceilings(matmul_tflops={"bfloat16": 1e6}, memory_gbps=1))
    slow = replace(machine(), ceilings=Ceilings(matmul_tflops={"bfloat16": 100}, memory_gbps=1))
    assert floors(shape, moved, slow)["both_ms"] == pytest.approx(3 * flops / 100e12 * 1e3)
    wire_ms = 2 * moved.wire_rows * 4096 * 2 / 450e9 * 1e3
    assert floors(shape, moved, fast)["forward_ms"] == pytest.approx(wire_ms)
    assert "100 TFLOP/s (bfloat16)" in floors(shape, moved, slow)["arithmetic"]


def figure(name: str, role: str, both_ms: list[float], peak: float) -> dict[str, Any]:
    moved = {"chunks": 3, "before": 1.77, "after": 1.0, "receive_peak": 70}
    return {
        "name": name, "role": role, "reason": "", "errors": {"out": 1e-3}, "traffic": moved,
        "migrated_bytes": 2e9, "both_ms": both_ms, "forward_ms": [ms / 4 for ms in both_ms],
        "both_peak_bytes": peak * GIB, "forward_peak_bytes": peak * GIB / 2,
        "both_above_bytes": (peak - 1) * GIB, "both_reserved_bytes": 2 * peak * GIB,
    }  # fmt: skip


def profile_figures() -> dict[str, Any]:
    left_out = figure("standard_stock", "peer", [], 0.0) | {"reason": "out of memory: 300 GiB"}
    return {
        "profile": "80/16", "scaled": "80/4", "experts": 32,
        "floor": {"forward_ms": 10.0, "both_ms": 30.0, "arithmetic": "counted"},
        "variants": [
            left_out,
            figure("llep_published", "peer", [100.0, 104.0, 120.0], 50.0),
            figure("llep", "ours", [90.0, 80.0, 85.0], 40.0),
            figure("pipelined", "ours", [52.0, 52.0, 52.0], 20.0),
        ],
    }  # fmt: skip


def test_table_compares_with_both_forms_of_llep_and_shows_two_modes() -> None:
    lines = of_profile(profile_figures()).splitlines()
    times = next(line for line in lines if line.startswith("| pipelined | ours"))
    assert "| 52 (52-52) | 1.73 | 2.00, 2.00 | 1.63, 1.63 | 1.0e-03 |" in times
    memory = next(line for line in lines if line.startswith("| pipelined | 3"))
    assert (
        "| 20.000 | 19.000 | 40.000 | 60.0%, 60.0% | 50.0%, 50.0% | 70 | 1.77 -> 1.00 | 2.00 |"
        in memory
    )
    published = next(line for line in lines if line.startswith("| llep_published | peer"))
    assert "~104 (100-120)" in published
    assert "| standard_stock | peer | | | | | | | out of memory: 300 GiB |" in lines
    assert not any(line.startswith("| standard_stock | 3") for line in lines)
    assert "- llep: forward 22.5 20 21.25; both 90 80 85" in lines


def test_table_without_what_it_compares_with() -> None:
    figures = profile_figures()
    figures["variants"] = figures["variants"][-1:]
    record = {
        "ranks": 2, "machine": {"name": "Acme X1", "facts": {}}, "size": "65k",
        "shape": {"tokens": 65_536}, "command": "torchrun", "date": "today",
        "profiles": [figures],
    }  # fmt: skip
    text = markdown(record)
    assert text.startswith("# Expert dispatch on 2 x Acme X1") and "| 1.73 |  |  | 1.0e-03" in text
