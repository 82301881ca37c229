"""The component that scores in fp8: what it refuses, wraps and counts, and when it ends a run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.core.base import Target
from components.indexer_fp8 import IndexerFp8, recalls
from components.models.glm_flash import fp8_selector
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.fp8_selector import Fp8Selector
from components.models.glm_flash.indexer import IndexerInputs, PoolSelector
from components.models.glm_flash.sharded_selector import ShardedSelector
from components.models.glm_flash.sparse_kernels import KernelPoolSelector
from components.titan.trainer import RecipeTrainer
from kernels.backends.ops import INDEXER
from kernels.dsa.pooling import find_pools
from kernels.indexer import fp8, op
from kernels.indexer.windows import TILE, window_bytes
from launch.config.load import load_recipe
from launch.resume import compare
from launch.summary import memory_terms
from tests.training import full, metrics, small_overrides, train, write_corpus
from tests.unit.absorbed_support import Sorting, offer, prepared_selector
from tests.unit.config_support import STEADY_GLM, write_recipe

ON = "components.indexer_fp8.enabled=true"
CPU = torch.device("cpu")
LENGTHS = (300, 7, 2, 500)


def problems(tmp_path: Path, *overrides: str) -> list[str]:
    wide = ["model=glm_flash_4layer", "training.mixed_precision_param=bfloat16", ON]
    recipe = load_recipe(write_recipe(tmp_path, STEADY_GLM), [*wide, *overrides]).recipe
    made = IndexerFp8(recipe.components.indexer_fp8)
    return [f"{p.path}: {p.message}; {p.hint}" for p in made.check(recipe, Target("cuda", 1))]


def test_a_gpu_gains_nothing_from_the_plain_indexer(tmp_path: Path) -> None:
    assert problems(tmp_path) == []
    (found,) = problems(tmp_path, "model.indexer_kernel=torch")
    assert found.startswith("components.indexer_fp8.enabled: true gains nothing: indexer kernel: ")
    assert "use a model.indexer_kernel that runs, or components.indexer_fp8.enabled" in found


@pytest.mark.parametrize("capability, fits", [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_products_of_fp8_is_refused(
    capability: tuple[int, int], fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    found = problems(tmp_path)
    assert fits == (not found)
    if found:
        assert (
            "cannot run here: its kernels are for sm_89 or newer, and the GPU is sm_80"
            in (found[0])
        )


@pytest.mark.parametrize("sharded", [False, True])
def test_every_selector_is_wrapped_and_still_gets_its_kernel(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, Sorting(), "triton", INDEXER)
    overrides = [ON, "model.indexer_kernel=triton", "components.indexer_fp8.compared=5"]
    overrides += [f"components.indexer_fp8.rotate={sharded}"]
    overrides += ["components.indexer_sharding.enabled=true"] if sharded else []
    recipe = load_recipe(write_recipe(tmp_path, STEADY_GLM), overrides).recipe
    selector = prepared_selector(recipe, tmp_path)
    assert isinstance(selector, Fp8Selector.Config)
    assert (selector.count, selector.kpool, selector.compared) == (32, 4, 5)
    assert selector.rotate == sharded
    inner = selector.inner
    if sharded:
        assert isinstance(inner, ShardedSelector.Config)
        inner = inner.inner
    assert isinstance(inner, KernelPoolSelector.Config)
    assert (selector.scale, selector.count) == (inner.scale, inner.topk // inner.kpool)


def case() -> tuple[IndexerInputs, Documents]:
    low, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    pools = find_pools(LENGTHS, 4, CPU)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=low)

    keys = draw(len(pools.first), 16)
    return (
        IndexerInputs(draw(total, 3, 16), draw(total, 3), keys, pools),
        Documents.from_lengths(LENGTHS),
    )


def selector(compared: int = 10**6, count: int = 8, rotate: bool = True) -> Fp8Selector:
    inner = PoolSelector.Config(topk=4 * count, kpool=4, scale=0.25)
    return Fp8Selector.Config(
        inner=inner, count=count, kpool=4, scale=0.25, rotate=rotate, compared=compared
    ).build()


def by_hand(chosen: torch.Tensor, rows: range, count: int = 8) -> tuple[int, int]:
    """Pools of full precision in ``chosen``, and how many there are, where there is a choice."""
    inputs, documents = case()
    plain = PoolSelector.Config(topk=4 * count, kpool=4, scale=0.25).build()
    exact, found, wanted = plain(inputs, documents, 0), 0, 0
    for row in rows:
        if (documents.position[row] + 1) // 4 > count:
            best = {*exact[row].tolist()}
            found, wanted = found + len(best & {*chosen[row].tolist()}), wanted + len(best)
    return found, wanted


@pytest.mark.parametrize("rotate", [False, True])
def test_it_chooses_by_rounded_operands(rotate: bool) -> None:
    inputs, documents = case()
    made = selector(rotate=rotate)
    a = fp8.in_fp8(inputs.queries, inputs.weights, inputs.keys, rotate)
    back = replace(
        inputs,
        queries=a.queries.float(),
        weights=a.weights,
        keys=a.keys.float() * a.key_factors.unsqueeze(1),
    )
    assert torch.equal(made(inputs, documents, 0), made.inner(back, documents, 0))


def test_it_counts_the_pools_of_full_precision_that_it_finds() -> None:
    inputs, documents = case()
    made = selector()
    chosen = made(inputs, documents, 0)
    found, wanted = by_hand(chosen, range(sum(LENGTHS)))
    assert (made.found, made.wanted) == (found, wanted) and 0.8 < found / wanted < 1
    made(inputs, documents, 0)
    assert (made.found, made.wanted) == (2 * found, 2 * wanted)
    made.reset()
    assert recalls([made], CPU, None) == {}


def test_comparing_takes_the_kernels_where_they_run_and_few_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, documents = case()
    made, asked = selector(), []
    chosen = made(inputs, documents, 0)
    real = op.select

    def select(*args: Any, backend: str, **options: Any) -> torch.Tensor:
        asked.append((backend, args[5]))
        return real(*args, backend="torch", **options)

    monkeypatch.setattr(op, "select", select)
    monkeypatch.setattr(op, "refusal", lambda queries, count: None)
    monkeypatch.setattr(fp8_selector, "CAP_BYTES", 100_000)
    made.reset()
    assert torch.equal(made(inputs, documents, 0), chosen)
    assert (made.found, made.wanted) == by_hand(chosen, range(sum(LENGTHS)))
    ((backend, windows),) = asked
    assert backend == "triton" and len(windows) > 1
    for window in windows:
        rows = window.q1 - window.q0
        assert window_bytes(rows, window.width, 8) <= 100_000 < window_bytes(200, window.width, 8)
        assert window.width % TILE == 0 and window.width >= len(inputs.keys)
        assert window.widest == max(LENGTHS) // 4


def test_no_queries_choose_nothing_and_compare_nothing() -> None:
    """A rank may have none, of documents that leave others a choice."""
    inputs, documents = case()
    none = replace(inputs, queries=inputs.queries[:0], weights=inputs.weights[:0])
    made = selector()
    assert made(none, documents.rows(5, 5), 5).shape == (0, 8) and made.wanted is None


@pytest.mark.parametrize("compared", [1, 7, 100])
def test_few_queries_are_evenly_spaced_and_the_last_is_one(compared: int) -> None:
    inputs, documents = case()
    made, total = selector(compared), sum(LENGTHS)
    chosen = made(inputs, documents, 0)
    step = -(-total // compared)
    rows = range((total - 1) % step, total, step)
    assert len(rows) <= compared and rows[-1] == total - 1
    assert (made.found, made.wanted) == by_hand(chosen, rows)


def test_pieces_choose_and_count_as_the_whole() -> None:
    inputs, documents = case()
    made, total = selector(), sum(LENGTHS)
    whole = made(inputs, documents, 0)
    counted = made.found, made.wanted
    made.reset()
    for begin, stop in ((0, 250), (250, 301), (301, total)):
        rows = slice(begin, stop)
        some = replace(inputs, queries=inputs.queries[rows], weights=inputs.weights[rows])
        assert torch.equal(made(some, documents.rows(begin, stop), begin), whole[rows])
    assert (made.found, made.wanted) == counted


def test_documents_without_a_choice_are_not_counted() -> None:
    inputs, documents = case()
    made = selector(count=125)
    assert made(inputs, documents, 0).shape[1] == 125 and made.wanted is None
    made = selector(count=124)
    made(inputs, documents, 0)
    assert made.wanted == 124  # the last query alone


def counted(found: int, wanted: int) -> Any:
    return SimpleNamespace(found=torch.tensor(found), wanted=torch.tensor(wanted))


def test_recall_is_by_layer_and_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(found=None, wanted=None)
    layers = [counted(9, 10), nothing, counted(1, 2)]
    assert recalls(layers, CPU, None) == {0: 0.9, 2: 0.5}
    assert recalls([counted(0, 5)], CPU, None) == {0: 0.0}
    asked = []

    def add_other_rank(total: torch.Tensor, group: Any) -> None:
        asked.append(group)
        total += torch.tensor([0, 10, 3, 4, 0, 0])

    monkeypatch.setattr("torch.distributed.all_reduce", add_other_rank)
    group: Any = "the ranks"
    assert recalls(layers, CPU, group) == {0: 0.45, 1: 0.75, 2: 0.5} and asked == [group]
    assert recalls([], CPU, group) == {} and len(asked) == 1


def test_every_step_counts_for_itself(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, STEADY_GLM), [ON]).recipe
    inputs, documents = case()
    made, part = selector(), torch.nn.Module()
    part.selector = made
    trainer: Any = SimpleNamespace(model_parts=[part])
    for _ in range(2):
        IndexerFp8(recipe.components.indexer_fp8).before_step(trainer)
        chosen = made(inputs, documents, 0)
        assert (made.found, made.wanted) == by_hand(chosen, range(sum(LENGTHS)))


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = write_corpus(tmp_path_factory.mktemp("fp8") / "corpus")
    return [*small_overrides(corpus), "model=glm_flash_tiny", "model.index_topk=16", ON]


def weights_after(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    trainer.train()
    named = trainer.model_parts[0].named_parameters()
    return {n.replace("_checkpoint_wrapped_module.", ""): full(p).clone() for n, p in named}


def test_a_run_says_its_recall_and_recomputation_changes_nothing(
    tmp_path: Path, overrides: list[str]
) -> None:
    """Nor do pieces of the batch: every row is rounded by itself."""
    given = [*overrides, "training.steps=2", "components.indexer_fp8.min_recall=0.5"]
    variants = {
        "kept": [],
        "again": ["components.layer_recompute.enabled=true"],
        "pieces": ["components.sublayer_chunking.enabled=true"],
    }
    weights: dict[str, dict[str, torch.Tensor]] = {}
    shares: dict[str, list[float]] = {}
    for name, more in variants.items():
        weights[name] = train(tmp_path / name, [*given, *more], use=weights_after)
        lines = metrics(tmp_path / name)
        shares[name] = [x["indexer/fp8_recall"] for x in lines if "indexer/fp8_recall" in x]
    assert len(shares["kept"]) == 2 and all(0.5 < share < 1 for share in shares["kept"])
    assert shares["again"] == shares["kept"]
    for name, weight in weights["kept"].items():
        torch.testing.assert_close(weights["again"][name], weight, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(weights["pieces"][name], weight, rtol=1e-4, atol=1e-6)


def test_a_run_ends_where_too_few_pools_are_found(tmp_path: Path, overrides: list[str]) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"components.indexer_fp8.min_recall: 1.0, and in step 1 fp8 chose 0\.\d+ of the "
        r"pools that full precision chooses in sparse layer 0 of 1; legal: a min_recall up to",
    ):
        train(tmp_path, [*overrides, "components.indexer_fp8.min_recall=1.0"])


def metrics_of(*layers: Any, min_recall: float = 0.9) -> dict[str, float]:
    dims = SimpleNamespace(get_optional_mesh={"loss": None}.__getitem__)
    parts = [Parts(layers)]
    trainer: Any = SimpleNamespace(parallel_dims=dims, model_parts=parts, device=CPU, step=7)
    return IndexerFp8(IndexerFp8.Config(min_recall=min_recall)).metrics(trainer)


class Parts:
    """A model of selectors that have counted."""

    def __init__(self, layers: Any) -> None:
        self.layers = layers

    def modules(self) -> list[Fp8Selector]:
        made = [selector() for _ in self.layers]
        for module, counts in zip(made, self.layers, strict=True):
            module.found, module.wanted = counts.found, counts.wanted
        return made


def test_the_layer_with_the_fewest_is_said_and_a_share_that_it_says_is_legal() -> None:
    nothing = SimpleNamespace(found=None, wanted=None)
    layers = nothing, counted(99_999, 100_000), counted(95_678, 100_000)
    assert metrics_of(*layers) == {"indexer/fp8_recall": 0.95678}
    assert metrics_of(*layers, min_recall=0.95678) == {"indexer/fp8_recall": 0.95678}
    assert metrics_of(nothing) == {}
    with pytest.raises(
        RuntimeError, match=r"in step 7 .* chose 0\.9567 of .* layer 2 of 3; legal: .*continue"
    ):
        metrics_of(*layers, min_recall=0.9568)
    assert metrics_of(*layers, min_recall=0.9567)


def test_what_only_looks_on_may_change_when_a_run_continues() -> None:
    key = "components.indexer_fp8"
    before = {f"{key}.enabled": True, f"{key}.min_recall": 0.9, f"{key}.compared": 128}
    now = {"enabled": True, "min_recall": 0.5, "compared": 4}
    given = {"components": {"indexer_fp8": now | {"rotate": False}}}
    assert compare({**before, f"{key}.rotate": True}, given) == [(f"{key}.rotate", True, False)]


def test_the_plan_has_the_rounded_operands(tmp_path: Path) -> None:
    for ranks in (1, 2):  # tensor ranks hold the queries of all
        given = [ON, f"parallelism.tensor_parallel_degree={ranks}"]
        recipe = load_recipe(write_recipe(tmp_path, STEADY_GLM), given).recipe
        model = recipe.model
        terms = {t.name: t.nbytes for t in memory_terms(recipe, Target("cuda", ranks))}
        heads, width = model.index_n_heads, model.index_head_dim  # type: ignore[attr-defined]
        of_keys = 2048 * ((width + 4) // 4)
        assert terms["queries and keys of one layer's indexer in fp8"] == (
            2048 * heads * (width + 8) + of_keys
        )
