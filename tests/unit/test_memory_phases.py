"""What runs again in backward is told apart: a whole layer, a piece of one, a rebuilt input."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from components.offload.slabs import Slab
from components.offload.streams import InLine
from components.recompute.layer import RecomputedLayer
from components.recompute.segment import Segment
from components.titan.memory.host import host_storages
from components.titan.memory.ledger import Ledger
from components.titan.memory.phases import PhaseLog, phase_name, sort_blocks
from components.titan.memory.places import Place, PlaceTracker
from components.titan.memory.recorder import StepRecord
from components.titan.memory.report import phase_peaks
from components.titan.memory.timeline import Block, Phase, Timeline
from tests.training import small_overrides, train, write_corpus

CPU = torch.device("cpu")


class Pieces(torch.autograd.Function):
    """Keeps its input alone and runs its part again in backward, two rows at a time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.part = part
        return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        found = []
        for piece, of_piece in zip(x.split(2), gradient.split(2), strict=True):
            piece = piece.detach().requires_grad_()
            with torch.enable_grad():
                ctx.part(piece).backward(of_piece)
            found.append(piece.grad)
        return torch.cat(found), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pieces.apply(self.up(x).sin(), self.part) + x


Wrap = Callable[[list[nn.Module]], list[nn.Module]]


class Model(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.tok_embeddings = nn.Linear(8, 8)
        wrapped = wrap([Layer() for _ in range(2)])
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(wrapped)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x


class Checkpointed(nn.Module):
    """Run as torch's own policy runs a layer, but with the layer's names."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self._checkpoint_wrapped_module
        return checkpoint(layer, x, use_reentrant=False, early_stop=False)


def in_segment(layers: list[nn.Module]) -> list[nn.Module]:
    segment = Segment(len(layers))
    return [RecomputedLayer(layer, segment, place) for place, layer in enumerate(layers)]


def run(wrap: Wrap) -> tuple[PhaseLog, Ledger]:
    """One step of the model, with its phases and blocks; seconds count events."""
    model, log = Model(wrap), PhaseLog()
    now = iter(range(1, 10**9))

    def clock() -> float:
        return float(next(now))

    tracker = PlaceTracker([model])
    tracker.on_change.append(lambda place: log.change(place, clock()))
    ledger = Ledger("cpu", clock, lambda: tracker.here)
    ledger.open()
    tracker.attach()
    try:
        tracker.at("data")
        model(torch.ones(4, 8)).sum().backward()
        tracker.at("optimizer")
    finally:
        tracker.detach()
        ledger.close()
    return log, ledger


FORWARD = ["forward tok_embeddings", "forward layers.0", "forward layers.1"]


def names(log: PhaseLog) -> list[str]:
    # The input is made before the log's first phase.
    return [phase.name for phase in log.phases if phase.work not in ("data", "loss")]


def test_pieces_that_run_again_belong_to_their_layers_backward() -> None:
    log, ledger = run(lambda layers: layers)
    assert names(log) == [
        *FORWARD,
        *["backward layers.1", "backward layers.0", "backward tok_embeddings", "optimizer"],
    ]
    inside = {place.module for _, place in log.places if place.work == "backward"}
    assert {"layers.0.part.0", "layers.1.part.1"} <= inside, "the peak can name the module"
    blocks = [entry.block for entry in ledger.entries]
    sort_blocks(blocks, log.phases)
    forward = [b for b in blocks if b.place.work == "forward" and b.place.layer]
    categories = {block.category for block in forward if block.category != "temporary"}
    assert categories == {"activations"}, "no layer runs again, so none keeps things for that"


def test_a_recomputed_layer_of_pieces_has_one_recompute_phase() -> None:
    log, ledger = run(lambda layers: [Checkpointed(layer) for layer in layers])
    back = [["backward", "recompute", "backward"] for _ in range(2)]
    expected = [f"{w} layers.{1 - i}" for i, works in enumerate(back) for w in works]
    assert [n for n in names(log) if not n.startswith("forward")] == [
        *expected,
        *["backward tok_embeddings", "optimizer"],
    ]
    again = {place.module for _, place in log.places if place.work == "recompute"}
    assert {"layers.0", "layers.0.up", "layers.0.part.0"} <= again
    blocks = [entry.block for entry in ledger.entries]
    sort_blocks(blocks, log.phases)
    works = {"forward": "kept", "recompute": "activations"}
    for work, category in works.items():
        lasting = {b.category for b in blocks if b.place.work == work and b.place.layer}
        assert lasting - {"temporary"} <= {category}
    assert any(b.category == "activations" for b in blocks if b.place.work == "recompute")


def test_a_run_for_the_input_of_a_later_layer_is_a_rebuild() -> None:
    log, ledger = run(in_segment)
    found = [name for name in names(log) if name.startswith(("rebuild", "recompute"))]
    assert found == ["rebuild layers.0", "recompute layers.1", "recompute layers.0"]
    blocks = [entry.block for entry in ledger.entries]
    sort_blocks(blocks, log.phases)
    rebuilt = [b for b in blocks if b.place.work == "rebuild" and b.category != "temporary"]
    assert [(block.category, block.shape) for block in rebuilt] == [("kept", (4, 8))]


def test_a_place_knows_its_layer_or_top_level_module() -> None:
    assert Place("forward", "layers.12.moe.router").unit == "layers.12"
    assert Place("forward", "norm").unit == "norm"
    assert Place("forward", "mtp.head").unit == "mtp"
    assert Place("forward").unit == ""
    assert phase_name(Place("rebuild", "layers.3.moe")) == "rebuild layers.3"
    assert phase_name(Place("rebuild")) == ""


def test_phases_of_one_name_share_a_line_with_their_largest_total() -> None:
    blocks = [Block(10, 0.0), Block(5, 1.0, 2.0), Block(90, 3.0, 4.0), Block(20, 4.0, 5.0)]
    order = ["data", "backward layers.0", "recompute layers.0"]
    order += ["backward layers.0", "recompute layers.0", "backward layers.0", "optimizer"]
    phases = [Phase(n, n.partition(" ")[0], float(at)) for at, n in enumerate(order)]
    timeline = Timeline("t", "s", blocks, phases, [], 7.0)
    assert phase_peaks(timeline) == [
        *[("data", 10), ("backward layers.0", 100), ("recompute layers.0", 30)],
        ("optimizer", 10),
    ]


def test_host_memory_is_left_out_and_what_comes_back_from_it_was_kept() -> None:
    slab = Slab(4096, CPU)
    assert len(host_storages()) >= 1
    ledger = Ledger("cpu", lambda: 1.0, lambda: Place("backward", "layers.0"), host_storages())
    ledger.open()
    try:
        lanes = InLine(CPU)
        lanes.offload(torch.ones(64, dtype=torch.uint8), slab.view(256, 64))
        back, _ = lanes.restore(slab.view(256, 64), None)
        other = torch.empty_like(back).copy_(back)
    finally:
        ledger.close()
    addresses = {entry.address: entry.block.category for entry in ledger.entries}
    assert slab.view(0, 1).data_ptr() not in addresses
    assert addresses[back.data_ptr()] == "kept"
    assert addresses[other.data_ptr()] == "other"
    slab.close()


def test_host_memory_of_a_slab_is_known_until_it_is_closed() -> None:
    slab = Slab(4096, CPU)
    key = slab.view(0, 1).untyped_storage()._cdata
    held = slab.view(0, 1)
    assert key in host_storages()
    slab.close()
    assert key not in host_storages()
    del held


PIECES = [
    "components.sublayer_chunking.enabled=true",
    "components.sublayer_chunking.chunk_tokens=64",
]


@pytest.mark.parametrize(
    ("more", "again"),
    [
        ([], []),
        (
            [
                "components.layer_recompute.enabled=true",
                "components.selective_checkpoint_offload.enabled=true",
            ],
            [f"recompute layers.{n}" for n in (3, 2, 1, 0)],
        ),
        (
            ["components.layer_recompute.enabled=true", "components.layer_recompute.every=2"],
            [
                *["rebuild layers.2", "recompute layers.3", "recompute layers.2"],
                *["rebuild layers.0", "recompute layers.1", "recompute layers.0"],
            ],
        ),
    ],
    ids=["pieces", "offload", "every2"],
)
def test_a_step_in_pieces_is_told_in_a_few_lines_per_layer(
    tmp_path: Path, more: list[str], again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timelines: list[Timeline] = []
    stop = StepRecord.stop

    def stopped(record: StepRecord, snapshot: Path) -> Timeline:
        timelines.append(stop(record, snapshot))
        return timelines[-1]

    monkeypatch.setattr(StepRecord, "stop", stopped)
    settings = [o for o in small_overrides(write_corpus(tmp_path / "corpus")) if "model=" not in o]
    settings += ["model=glm_flash_tiny", "training.steps=2", "checkpoint.enable=false"]
    settings += ["training.global_batch_size=4", "debug.memory_timeline=2", *PIECES, *more]
    train(tmp_path / "run", settings)
    words = (tmp_path / "run/memory_timeline.txt").read_text()
    told = words.partition("largest total of each phase:\n")[2].splitlines()
    phases = [re.sub(r"^ *[\d.]+ \w+  ", "", line) for line in told]
    assert len(set(phases)) == len(phases), "one line each, over both micro-batches"
    of_layers = [name for name in phases if " layers." in name]
    plain = [f"{work} layers.{n}" for work in ("forward", "backward") for n in range(4)]
    assert sorted(of_layers) == sorted([*plain, *again])
    assert [name for name in phases if name.startswith(("recompute", "rebuild"))] == again
    offloads = any("offload" in setting for setting in more)
    # Random states are bytes as well, and smaller.
    restored = [b for b in timelines[0].blocks if b.dtype == "uint8" and b.nbytes > 2**14]
    assert {(b.category, b.maker) for b in restored} <= {("kept", "aten.empty_like.default")}
    # Inputs of four layers in each of two micro-batches, and what the pieces gave the layers.
    assert len(restored) > 8 if offloads else not restored
    page = (tmp_path / "run/memory_timeline.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    assert len(data["phases"]) < 60
