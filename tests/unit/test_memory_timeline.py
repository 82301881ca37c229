"""A step's memory adds up, is put into the right categories, and is drawn into valid files."""

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from components.core.problems import RecipeError
from components.titan.memory.ledger import Ledger
from components.titan.memory.page import write_page
from components.titan.memory.phases import PhaseLog, phase_name, sort_blocks
from components.titan.memory.picture import write_picture
from components.titan.memory.places import Place, PlaceTracker, clean_name
from components.titan.memory.report import phase_peaks, report
from components.titan.memory.storages import unwrapped
from components.titan.memory.timeline import CATEGORIES, Block, Phase, Timeline
from launch.memory import refuse, settings
from tests.training import losses, small_overrides, train, write_corpus

KIB = 256
"""float32 numbers in a KiB."""


def toy() -> Timeline:
    """100 bytes of parameters; 50 in forward, freed in backward; 30 more from 2 s to 3 s."""
    blocks = [
        Block(nbytes=100, born=0.0, category="parameters", shape=(25,), dtype="float32", name="w"),
        Block(50, 1.0, 4.0, Place("forward", "layers.0.mlp"), "activations", (50,), "uint8", "mul"),
        Block(30, 2.0, 3.0, Place("forward", "layers.1"), "temporary"),
    ]
    phases = [Phase("data", "data", 0.0), Phase("forward layers.0", "forward", 1.0)]
    phases += [Phase("forward layers.1", "forward", 2.0), Phase("optimizer", "optimizer", 4.5)]
    modules = [(1.0, "layers.0.mlp"), (2.0, "layers.1"), (4.5, "")]
    return Timeline("toy", "hand", blocks, phases, modules, 5.0)


def test_a_known_program_has_the_known_timeline() -> None:
    timeline = toy()
    assert timeline.times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert timeline.totals.tolist() == [100, 150, 180, 150, 100]
    peak = timeline.peak
    assert (peak.time, peak.nbytes, peak.phase, peak.module) == (
        *(2.0, 180),
        *("forward layers.1", "layers.1"),
    )
    assert [block.nbytes for block in timeline.alive_at(2.5)] == [100, 50, 30]
    assert phase_peaks(timeline) == [
        *[("data", 100), ("forward layers.0", 150)],
        *[("forward layers.1", 180), ("optimizer", 100)],
    ]


def test_the_report_names_the_peak_its_parts_and_the_largest_tensors() -> None:
    words = report(toy())
    assert "peak 180 B (180 bytes) at 2,000.0 ms: forward layers.1, in layers.1" in words
    assert "float32 [25], parameters of w, there before the step" in words
    assert "uint8 [50], activations, made in forward of layers.0.mlp by mul" in words
    assert "allocated inside a kernel or library, temporary, made in forward of layers.1" in words


def adds_up(timeline: Timeline) -> None:
    """Categories, total and peak, recounted block by block at every event."""
    for index, time in enumerate(timeline.times):
        alive = [b for b in timeline.blocks if b.alive_at(float(time))]
        assert timeline.totals[index] == sum(b.nbytes for b in alive)
        for row, category in enumerate(CATEGORIES):
            of_category = sum(b.nbytes for b in alive if b.category == category)
            assert timeline.curves[row, index] == of_category
    assert timeline.peak.nbytes == timeline.totals.max() == max(timeline.totals)


def test_the_accounting_adds_up_at_every_event() -> None:
    adds_up(toy())
    generator = np.random.default_rng(0)
    blocks = []
    for _ in range(200):
        born = float(generator.integers(-3, 40)) / 4
        died = born + float(generator.integers(1, 30)) / 4
        category = list(CATEGORIES)[generator.integers(len(CATEGORIES))]
        size = int(generator.integers(1, 1000))
        ends = died if died > 0 and generator.random() < 0.8 else None
        blocks.append(Block(size, born, ends, category=category))
    adds_up(Timeline("random", "dice", blocks, [Phase("data", "data", 0.0)], [], 20.0))


def test_thinning_keeps_the_peak() -> None:
    blocks = [Block(1 + (i == 617) * 9, i / 10, (i + 1) / 10) for i in range(1000)]
    timeline = Timeline("t", "s", blocks, [Phase("data", "data", 0.0)], [], 100.0)
    picked = timeline.thinned(50)
    assert len(picked) == 50 and (np.diff(picked) > 0).all()
    assert timeline.totals[picked].max() == timeline.peak.nbytes == 10


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def open_ledger() -> tuple[Ledger, Clock]:
    clock = Clock()
    ledger = Ledger("cpu", clock, lambda: Place("forward", "layers.0"))
    ledger.open()
    return ledger, clock


def test_the_ledger_sees_births_and_deaths_but_no_views() -> None:
    ledger, clock = open_ledger()
    known = len(ledger.entries)
    try:
        first = torch.ones(4 * KIB)
        view = first.view(4, KIB)[1:]
        second = view * 2
        del first
        before = clock.now
        del view
    finally:
        ledger.close()
    made = [entry.block for entry in ledger.entries[known:]]
    assert [block.nbytes for block in made] == [4096, 3072]
    assert made[0].died is not None and made[0].died > before
    assert made[1].died is None and made[1].shape == (3, KIB) and made[1].dtype == "float32"
    assert made[1].maker == "aten.mul.Tensor" and made[1].place.layer == "layers.0"
    del second
    assert made[1].died is None, "closed books do not change"


def test_the_ledger_takes_stock_and_keeps_the_stronger_word() -> None:
    stock = torch.ones(3 * KIB)
    ledger, _ = open_ledger()
    try:
        ledger.mark(stock[:2], "optimizer state", "w")
        ledger.mark({"a": [stock, None]}, "gradients")
        held = next(e for e in ledger.entries if e.address == stock.data_ptr())
    finally:
        ledger.close()
    assert held.block.category == "optimizer state" and held.block.name == "w"
    assert held.block.nbytes == 3072


def test_resizing_a_storage_ends_a_block_and_begins_another() -> None:
    gathered = torch.ones(KIB)
    inherited = torch.UntypedStorage.resize_
    ledger, _ = open_ledger()
    try:
        ledger.mark(gathered, "parameters", "w")
        known = len(ledger.entries)
        gathered.untyped_storage().resize_(0)
        gathered.untyped_storage().resize_(2048)
    finally:
        ledger.close()
    (again,) = (entry.block for entry in ledger.entries[known:])
    assert (again.nbytes, again.category, again.name) == (2048, "parameters", "w")
    first = next(e.block for e in ledger.entries if e.block.name == "w")
    assert first.nbytes == 1024 and first.died is not None and first.died < again.born
    assert torch.UntypedStorage.resize_ == inherited


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x).sigmoid()


class Model(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Linear(8, 8)
        self.layers = nn.ModuleDict({str(i): Mlp() for i in range(2)})
        self.norm = nn.LayerNorm(8)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(x)
        for layer in self.layers.values():
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=False, early_stop=False)
            else:
                x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize("recompute", [False, True])
def test_phases_follow_the_step_through_forward_and_backward(recompute: bool) -> None:
    model, log = Model(recompute), PhaseLog()
    tracker = PlaceTracker([model])
    tracker.on_change.append(lambda place: log.change(place, float(len(log.places))))
    tracker.attach()
    tracker.at("data")
    out = model(torch.ones(4, 8))
    loss = (out * 2).sum()
    loss.backward()
    tracker.at("optimizer")
    tracker.detach()
    again = (
        (lambda name: [f"recompute {name}", f"backward {name}"]) if recompute else (lambda name: [])
    )
    assert [phase.name for phase in log.phases] == [
        *["forward tok_embeddings", "forward layers.0", "forward layers.1", "forward norm"],
        *["loss", "backward norm", "backward layers.1", *again("layers.1")],
        *["backward layers.0", *again("layers.0"), "backward tok_embeddings", "optimizer"],
    ]
    assert "layers.1.up" in {place.module for _, place in log.places if place.work == "backward"}
    assert not any(module._forward_hooks for module in model.modules())


def test_a_forward_that_raises_leaves_the_tracker_in_order() -> None:
    model = Model(False)
    tracker = PlaceTracker([model])
    tracker.attach()
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 7))
    assert tracker.here.module == ""
    model(torch.ones(4, 8))
    assert tracker.here == Place("loss")
    tracker.detach()


def test_names_are_those_of_the_unwrapped_model() -> None:
    assert clean_name("layers.0._checkpoint_wrapped_module.moe") == "layers.0.moe"
    assert clean_name("layers.0._checkpoint_wrapped_module") == "layers.0"
    assert Place("forward", "layers.12.moe.router").layer == "layers.12"
    assert Place("forward", "norm").layer == Place("forward", "layers").layer == ""
    assert phase_name(Place("loss", "lm_head")) == "loss"
    assert phase_name(Place("forward")) == ""


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_are_sorted_by_where_they_were_made_and_how_long_they_live(recompute: bool) -> None:
    forward, again = Place("forward", "layers.0.x"), Place("recompute", "layers.0.x")
    backward = Place("backward", "layers.0.x")
    phases = [Phase("forward layers.0", "forward", 1.0), Phase("loss", "loss", 2.0)]
    if recompute:
        phases.append(Phase("recompute layers.0", "recompute", 3.0))
    phases += [Phase("backward layers.0", "backward", 4.0), Phase("optimizer", "optimizer", 5.0)]
    blocks = {
        "saved": Block(1, 1.5, 4.5, forward),
        "passing": Block(1, 1.5, 1.6, forward),
        "gradient": Block(1, 4.1, 4.9, backward),
        "weight": Block(1, 1.5, 4.5, forward, category="gradients"),
        "early": Block(1, 0.0, 4.5),
        "stays": Block(1, 5.5, None, Place("optimizer")),
        "input": Block(1, 0.5, 4.5, Place("data")),
    }
    if recompute:
        blocks["again"] = Block(1, 3.5, 4.5, again)
        blocks["again passing"] = Block(1, 3.5, 3.9, again)
    sort_blocks(list(blocks.values()), phases)
    expected = {
        "saved": "kept" if recompute else "activations",
        "passing": "temporary",
        "gradient": "temporary",
        "weight": "gradients",
        "early": "other",
        "stays": "other",
        "input": "other",
        "again": "activations",
        "again passing": "temporary",
    }
    assert {name: block.category for name, block in blocks.items()} == {
        name: category for name, category in expected.items() if name in blocks
    }


def check_png(file: Path) -> None:
    """Every chunk is there and its checksum right."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind = data[at + 4 : at + 8 + length]
        assert zlib.crc32(kind) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        kinds.append(kind[:4])
        at += 12 + length
    assert kinds[0] == b"IHDR" and kinds[-1] == b"IEND"


def page_data(file: Path) -> dict[str, Any]:
    """The figures in a page, which must be well-formed and need nothing else."""
    text = file.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)
    svg = re.search(r"<svg.*?</svg>", text, re.DOTALL)
    assert svg is not None
    shapes = [element.tag for element in ElementTree.fromstring(svg.group())]
    assert shapes.count("polygon") == len(CATEGORIES)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return json.loads(data.group(1))


def test_picture_and_page_are_valid_and_hold_the_figures(tmp_path: Path) -> None:
    timeline = toy()
    timeline.title = "a <title> & more"
    write_picture(timeline, tmp_path / "t.png")
    write_page(timeline, tmp_path / "t.html")
    check_png(tmp_path / "t.png")
    data = page_data(tmp_path / "t.html")
    assert [sum(row) for row in data["bytes"]] == timeline.totals.tolist()
    assert data["times"] == timeline.times.tolist()
    assert [data["modules"][i] for i in data["module"]] == [
        *["", "layers.0.mlp", "layers.1", "layers.1", "layers.1"],
    ]
    assert "a &lt;title&gt; &amp; more" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_a_step_is_drawn_and_trains_the_same(tmp_path: Path, recompute: str) -> None:
    plain = [
        *small_overrides(write_corpus(tmp_path / "corpus")),
        f"components.full_recompute.enabled={recompute}",
        "training.steps=2",
        "training.global_batch_size=4",
        "checkpoint.enable=false",
    ]
    train(tmp_path / "off", plain)
    train(tmp_path / "on", [*plain, "debug.memory_timeline=2"])
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    assert not list((tmp_path / "off").glob("memory_timeline*"))
    check_png(tmp_path / "on/memory_timeline.png")
    data = page_data(tmp_path / "on/memory_timeline.html")
    names = [name for _, name in data["phases"]]
    # Two micro-batches of two layers.
    assert names.count("forward layers.1") == 2 and names.count("loss") == 2
    assert names.count("recompute layers.0") == (2 if recompute == "true" else 0)
    assert (names[0], names[-1]) == ("data", "optimizer")
    words = (tmp_path / "on/memory_timeline.txt").read_text()
    peak = re.search(r"peak .* \(([\d,]+) bytes\)", words)
    assert peak is not None
    assert int(peak.group(1).replace(",", "")) == max(map(sum, data["bytes"]))
    last = dict(zip(data["categories"], data["bytes"][-1], strict=True))
    # AdamW keeps two moments per parameter; here every parameter has a gradient as well.
    assert last["parameters"] > 0 and last["gradients"] > 0
    assert last["optimizer state"] >= 2 * last["gradients"]
    assert last["activations"] == last["kept"] == 0


@pytest.mark.parametrize(
    ("step", "overrides", "problems"),
    [
        (0, [], ["STEP: 0 is no step"]),
        (2, ["training.steps=9"], ["training.steps: `make memory` sets it to 2 itself"]),
        (-1, ["++validation.enabled=true", "a=b"], ["STEP: -1", "validation.enabled: `make"]),
    ],
)
def test_what_make_memory_sets_is_not_overridden(
    step: int, overrides: list[str], problems: list[str]
) -> None:
    with pytest.raises(RecipeError) as raised:
        refuse(step, overrides, settings(step))
    found = [str(problem) for problem in raised.value.problems]
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True))


def test_other_overrides_are_free() -> None:
    refuse(3, ["training.seq_len=512", "model=moe_debug"], settings(3))


def test_tensors_that_a_compiler_only_imagines_are_no_memory() -> None:
    with FakeTensorMode():
        imagined = torch.empty(8, device="cuda")
    assert imagined.device.type == "cuda"
    assert list(unwrapped(imagined)) == []
    batched: list[torch.Tensor] = []
    torch.vmap(lambda row: batched.append(row) or row)(torch.ones(2, 3))  # type: ignore[func-returns-value]
    assert list(unwrapped(batched[0])) == []
