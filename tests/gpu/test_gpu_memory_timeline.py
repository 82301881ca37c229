"""On a GPU: the timeline is the allocator's own, with the tensors' names; the leak guard passes."""

import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchtitan.tools.utils

from components.core.base import Component
from components.titan.memory.allocator import AllocatorHistory
from components.titan.memory.leak_guard import ActivationLeak
from components.titan.memory.recorder import StepRecord
from components.titan.trainer import RecipeTrainer
from tests.training import losses, small_overrides, train, write_corpus
from tests.unit.test_leak_guard import KeepOnRouter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

MIB = 2**20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def test_the_history_has_the_bytes_and_times_of_a_known_program(tmp_path: Path) -> None:
    import time

    kept = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    history = AllocatorHistory()
    history.start()
    time.sleep(0.01)
    origin = time.time_ns() / 1e9
    first = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    time.sleep(0.05)
    middle = time.time_ns() / 1e9 - origin
    second = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    del first
    time.sleep(0.05)
    del second
    end = time.time_ns() / 1e9 - origin
    blocks = dict(history.stop(tmp_path / "s.pickle", origin))
    before = blocks[kept.data_ptr()]
    assert before.nbytes == 8 * MIB and before.born == 0.0 and before.died is None
    born = sorted((b for b in blocks.values() if b.born > 0), key=lambda block: block.born)
    assert [block.nbytes for block in born] == [4 * MIB, 2 * MIB]
    assert 0 < born[0].born < 0.04 < middle < born[1].born < born[0].died < born[1].died < end
    assert born[0].maker.startswith("gpu/test_gpu_memory_timeline.py:")
    assert pickle.loads((tmp_path / "s.pickle").read_bytes())["device_traces"]


@pytest.mark.parametrize("recompute", ["false", "true"])
@pytest.mark.parametrize("model", ["moe_debug", "glm_flash_tiny"])
def test_a_step_is_drawn_from_the_allocator_and_its_peak_is_cudas(
    model: str, recompute: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[dict[str, int]] = []
    start, stop = StepRecord.start, StepRecord.stop

    def started(record: StepRecord) -> None:
        start(record)
        torch.cuda.reset_peak_memory_stats()

    def stopped(record: StepRecord, snapshot: Path) -> object:
        peaks.append(torch.cuda.memory_stats())
        return stop(record, snapshot)

    monkeypatch.setattr(StepRecord, "start", started)
    monkeypatch.setattr(StepRecord, "stop", stopped)
    plain = [
        *(o for o in small_overrides(corpus) if not o.startswith("model=")),
        f"model={model}",
        f"components.full_recompute.enabled={recompute}",
        "training.steps=3",
        "checkpoint.enable=false",
        "debug.memory_timeline=2",
        # Logging, as of the last step, resets the peak that is compared with.
        "metrics.log_freq=100",
    ]
    train(tmp_path, plain)
    words = (tmp_path / "memory_timeline.txt").read_text()
    assert "the CUDA allocator's history" in words
    found = re.search(r"peak .* \(([\d,]+) bytes\)", words)
    assert found is not None
    drawn = int(found.group(1).replace(",", ""))
    low, high = (peaks[0][f"{name}_bytes.all.peak"] for name in ("requested", "active"))
    assert low <= drawn <= high
    page = (tmp_path / "memory_timeline.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    last = dict(zip(data["categories"], data["bytes"][-1], strict=True))
    assert last["parameters"] > 0 and last["gradients"] > 0
    assert last["optimizer state"] >= 1.5 * last["gradients"]
    names = [name for _, name in data["phases"]]
    assert names.count("forward layers.1") == names.count("loss") == 1
    assert names.count("recompute layers.0") == (recompute == "true")
    assert (tmp_path / "memory_timeline.png").stat().st_size > 10_000
    assert pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes())["segments"]


@pytest.mark.parametrize("recompute", ["false", "true"])
@pytest.mark.parametrize(
    "model",
    [
        ["model=moe_debug", "model.attention=flex"],
        ["model=moe_debug", "model.attention=sdpa"],
        ["model=glm_flash_tiny"],
    ],
    ids=" ".join,
)
def test_the_guard_lets_the_models_pass(
    model: list[str], recompute: str, corpus: Path, tmp_path: Path
) -> None:
    settings = [
        *(o for o in small_overrides(corpus) if not o.startswith("model=")),
        *model,
        f"components.full_recompute.enabled={recompute}",
        "training.steps=3",
        "checkpoint.enable=false",
        "debug.leak_guard=true",
    ]
    train(tmp_path, settings)
    assert len(losses(tmp_path)) == 3


def test_the_guard_names_a_leak(corpus: Path, tmp_path: Path) -> None:
    settings = [
        *small_overrides(corpus),
        "components.full_recompute.enabled=true",
        "debug.leak_guard=true",
    ]
    leaky = KeepOnRouter(Component.Config())
    with pytest.raises(ActivationLeak, match=r"moe\.router\.last_scores \("):
        train(tmp_path, settings, components=[leaky])


def test_an_out_of_memory_step_is_drawn(corpus: Path, tmp_path: Path) -> None:
    class TooMuch(Component):
        name = "too_much"

        def after_microbatch(self, trainer: RecipeTrainer) -> None:
            if trainer.step == 2:
                torch.empty(2**45, dtype=torch.uint8, device="cuda")

    settings = [*small_overrides(corpus), "debug.memory_timeline=2", "checkpoint.enable=false"]
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, settings, components=[TooMuch(SimpleNamespace())])
    words = (tmp_path / "memory_timeline.txt").read_text()
    assert words.splitlines()[0].endswith("OUT OF MEMORY")
