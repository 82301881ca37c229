"""On a GPU: attention backends and components learn the same (`make test ARGS="-m gpu"`)."""

import importlib.util
from pathlib import Path

import pytest
import torchtitan.tools.utils

from tests.training import losses, small_overrides, train, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("reference")
    train(run, [*small_overrides(corpus), "model.attention=sdpa"])
    return losses(run)


@pytest.mark.parametrize(
    "toggles",
    [
        ["model.attention=flex"],
        ["model.attention=flex", "components.full_recompute.enabled=true"],
        ["model.attention=sdpa", "components.full_recompute.enabled=true"],
        ["model.attention=sdpa", "components.chunked_loss.enabled=false"],
    ],
    ids=" ".join,
)
def test_a_toggle_does_not_change_what_is_learnt(
    toggles: list[str], corpus: Path, reference: list[float], tmp_path: Path
) -> None:
    train(tmp_path, [*small_overrides(corpus), *toggles])
    assert losses(tmp_path) == pytest.approx(reference, rel=2e-3)


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn_interface") is None, reason="needs FlashAttention 3"
)
def test_varlen_learns_the_same_in_bf16(corpus: Path, tmp_path: Path) -> None:
    # Flash attention computes in bf16 only, so both sides do.
    bf16 = [*small_overrides(corpus), "training.mixed_precision_param=bfloat16"]
    train(tmp_path / "varlen", [*bf16, "model.attention=varlen"])
    train(tmp_path / "sdpa", [*bf16, "model.attention=sdpa"])
    assert losses(tmp_path / "varlen") == pytest.approx(losses(tmp_path / "sdpa"), rel=2e-2)


def test_resuming_continues_the_same_run(
    corpus: Path, reference: list[float], tmp_path: Path
) -> None:
    for steps in (2, 4, 6):
        overrides = ["model.attention=sdpa", f"training.steps={steps}"]
        train(tmp_path, [*small_overrides(corpus), *overrides])
    assert losses(tmp_path) == pytest.approx(reference, rel=2e-3)
