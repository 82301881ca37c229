"""Sharing the scoring of pools: who scores what, what is refused, and how it meets a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.core.base import Target
from components.indexer_sharding import IndexerSharding, _connecting
from components.models.glm_flash import share_meter
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.sharded_selector import ShardedSelector, _pairs, deal
from components.models.glm_flash.share_meter import ShareMeter
from components.models.glm_flash.sparse_kernels import KernelPoolSelector
from kernels.backends.ops import INDEXER
from launch.config.load import load_recipe
from tests.unit.absorbed_support import Sorting, offer, prepared_selector
from tests.unit.chunked_support import build, config_of
from tests.unit.config_support import STEADY_GLM, write_recipe

ON = "components.indexer_sharding.enabled=true"


def test_blocks_are_dealt_back_and_forth() -> None:
    blocks = [(n, n + 1) for n in range(8)]
    owners = [[turn.index(b) for turn in deal(blocks, 3) if b in turn][0] for b in blocks]
    assert owners == [0, 1, 2, 2, 1, 0, 0, 1]
    assert deal(blocks, 3)[-1] == [(6, 7), (7, 8), None]
    assert deal(blocks[:1], 4) == [[(0, 1), None, None, None]]
    assert deal([], 4) == []


@pytest.mark.parametrize("lengths", [(5000,), (1, 4, 3, 900, 64, 2, 5), (2000, 1500, 3)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_score_nearly_the_same_number_of_pairs(lengths: Any, ranks: int) -> None:
    documents, total = Documents.from_lengths(lengths), sum(lengths)
    blocks = [(b, min(b + 16, total)) for b in range(0, total, 16)]
    shares = []
    for rank in range(ranks):
        mine = [turn[rank] for turn in deal(blocks, ranks)]
        shares.append(_pairs([b for b in mine if b is not None], documents, 0, 4))
    expected = ((documents.position + 1) // 4).sum().item()
    assert sum(shares) == expected == _pairs(blocks, documents, 0, 4)
    # One block of the longest document's last queries, and what its ragged ends leave.
    assert max(shares) - min(shares) <= 2 * 16 * (max(lengths) // 4)


def test_pairs_of_a_piece_are_those_of_its_queries() -> None:
    documents = Documents.from_lengths((9, 30, 2))
    visible = (documents.position + 1) // 4
    for begin, block in ((0, (3, 20)), (7, (0, 5)), (11, (2, 30))):
        wanted = visible[begin + block[0] : begin + block[1]].sum().item()
        assert _pairs([block], documents, begin, 4) == wanted


def test_time_saved_is_what_all_pairs_would_have_taken_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 6.0, 7.0])
    monkeypatch.setattr(share_meter.time, "perf_counter", lambda: next(clock))
    meter = ShareMeter()
    with meter.call(torch.device("cpu")):
        for _ in range(2):
            with meter.scoring():
                pass
    meter.pairs(25, 100)
    assert meter.seconds_saved == pytest.approx(4 * (2 + 2) - 7)
    meter.reset()
    meter.pairs(0, 100)
    assert meter.seconds_saved == 0


def problems(tmp_path: Path, *overrides: str) -> list[str]:
    recipe = load_recipe(write_recipe(tmp_path, STEADY_GLM), [ON, *overrides]).recipe
    component = IndexerSharding(recipe.components.indexer_sharding)
    return [f"{p.path}: {p.message}" for p in component.check(recipe, Target("cpu", 1))]


def test_a_run_without_ranks_that_share_queries_is_told_so(tmp_path: Path) -> None:
    assert problems(tmp_path) == [
        "components.indexer_sharding.enabled: true has no effect: no two ranks hold the same "
        "queries where parallelism.tensor_parallel_degree is 1"
    ]
    assert problems(tmp_path, "parallelism.tensor_parallel_degree=2") == []
    assert problems(tmp_path, "parallelism.context_parallel_degree=2")


def test_a_model_without_sparse_attention_has_nothing_to_share(tmp_path: Path) -> None:
    assert "has no indexer" in problems(tmp_path, "model.layer_types=[kda,kda,kda,kda]")[0]


def test_every_selector_is_wrapped_and_still_gets_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, Sorting(), "triton", INDEXER)
    overrides = [ON, "model.indexer_kernel=triton"]
    recipe = load_recipe(write_recipe(tmp_path, STEADY_GLM), overrides).recipe
    selector = prepared_selector(recipe, tmp_path)
    assert isinstance(selector, ShardedSelector.Config)
    assert isinstance(selector.inner, KernelPoolSelector.Config)


class Dims:
    """Meshes of the given names, each with its name as group."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_optional_mesh(self, name: str) -> Any:
        return SimpleNamespace(get_group=lambda: name) if name in self.names else None


def sharded_mixer() -> Any:
    config = config_of("dsa")
    config.indexer.selector = ShardedSelector.Config(inner=config.indexer.selector)
    return build(config)


def test_selectors_learn_their_ranks_from_the_mesh() -> None:
    mixer = sharded_mixer()
    connect = _connecting(lambda model, **_: model)
    assert connect(mixer, parallel_dims=Dims("tp", "fsdp"), other=1) is mixer
    assert mixer.indexer.selector.group == "tp"


@pytest.mark.parametrize("names", [(), ("cp",)])
def test_a_run_without_tensor_ranks_is_refused(names: tuple[str, ...]) -> None:
    connect = _connecting(lambda model, **_: model)
    with pytest.raises(ValueError, match="tensor_parallel_degree is 1; legal: 2 or more"):
        connect(sharded_mixer(), parallel_dims=Dims(*names))


def test_a_selector_without_ranks_does_not_run_alone() -> None:
    mixer = sharded_mixer()
    with pytest.raises(RuntimeError, match="before it was given its ranks"):
        mixer(torch.randn(1, 40, 32, dtype=torch.float64), Documents.from_lengths((40,)))
