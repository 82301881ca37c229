"""Two ranks with recomputed layers learn what two ranks without learn, to the bit."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from components.recompute.tape import recomputing
from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.training import checkpoint_state, losses, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

GLM = ["model=glm_flash_tiny", "model.index_topk=16"]
MOE = ["model=moe_debug", "model.n_layers=4"]
EP = ["parallelism.expert_parallel_degree=2"]
GATHERED = ["parallelism.fsdp_reshard_after_forward=never"]
ON = "components.layer_recompute.enabled=true"
EVERY = "components.layer_recompute.every"
KEEP = "components.layer_recompute.keep_sublayers=true"

# Forward of one micro-batch runs between forward and backward of another.
PP = [
    "parallelism.pipeline_parallel_degree=2",
    "parallelism.pipeline_parallel_microbatch_size=1",
    "parallelism.pipeline_parallel_schedule=1F1B",
    "components.chunked_loss.enabled=false",
]

LAYOUTS = {
    "glm_fsdp2": [*GLM],
    "glm_fsdp2_ep2": [*GLM, *EP],
    "moe_fsdp2_ep2": [*MOE, *EP],
    "moe_pp2": [*MOE, *PP],
}
RUNS = [
    ("glm_fsdp2", [f"{EVERY}=1"]),
    ("glm_fsdp2", [f"{EVERY}=3"]),
    ("glm_fsdp2", [f"{EVERY}=4", KEEP, *GATHERED]),
    ("glm_fsdp2_ep2", [f"{EVERY}=1"]),
    ("glm_fsdp2_ep2", [f"{EVERY}=3"]),
    ("moe_fsdp2_ep2", [f"{EVERY}=2"]),
    ("moe_pp2", [f"{EVERY}=2"]),
]
# Each takes a quarter of a minute; these cross every path that two ranks add.
QUICK = [RUNS[2]]


def overrides(text: Path, layout: str) -> list[str]:
    """Two micro-batches of two samples on each rank."""
    small = [o for o in small_overrides(text) if not o.startswith("model=")]
    return [*small, *LAYOUTS[layout], "training.global_batch_size=8", "training.steps=3"]


def run_plain(run_dir: str, settings: list[str]) -> None:
    train(Path(run_dir), settings)


def run_watched(run_dir: str, settings: list[str], every: int, resharded: bool) -> None:
    """Train, and check at every run of a layer in backward which layers are gathered."""
    train(Path(run_dir), settings, use=partial(train_watched, every=every, resharded=resharded))


def train_watched(trainer: RecipeTrainer, every: int, resharded: bool) -> None:
    layers = list(trainer.model_parts[0].layers.values())
    first_weights = [next(iter(layer.named_parameters()))[0] for layer in layers]
    runs = 0

    def gathered() -> set[int]:
        parameters = (layer.get_parameter for layer in layers)
        found = [get(name) for get, name in zip(parameters, first_weights, strict=True)]
        return {n for n, parameter in enumerate(found) if not isinstance(parameter, DTensor)}

    def watch(place: int) -> None:
        nonlocal runs
        if not recomputing():
            return
        runs += 1
        last = min(place - place % every + every, len(layers)) - 1
        if torch.is_grad_enabled():
            # Its own backward: the layer before may be there already, none after it.
            assert {place} <= gathered() <= {place - 1, place}, (place, gathered())
        else:
            running = {n for n in gathered() if n != place}
            assert place in gathered() and max(running) <= last, (place, gathered())
            assert len(running) <= 2, (place, gathered())

    if resharded:
        assert gathered() == set()
        for place, layer in enumerate(layers):
            block = layer.get_submodule("_checkpoint_wrapped_module")
            block.register_forward_pre_hook(lambda *unused, place=place: watch(place))
    trainer.train()
    if resharded:
        assert gathered() == set()
        assert runs == 3 * 2 * (2 * len(layers) - -(-len(layers) // every))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("recompute") / "corpus")


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a layout without recomputation."""
    folder = tmp_path_factory.mktemp("plain")

    @cache
    def run(layout: str) -> Path:
        settings = overrides(text, layout)
        run_ranks(run_plain, 2, folder / f"{layout}_ranks", str(folder / layout), settings)
        return folder / layout

    return run


@pytest.mark.parametrize(
    ("layout", "switches"),
    [pytest.param(*run, marks=[] if run in QUICK else [pytest.mark.slow]) for run in RUNS],
    ids=lambda value: "".join(value).split(".")[-1],
)
def test_two_ranks_learn_the_same_to_the_bit(
    tmp_path: Path, text: Path, plain: Callable[[str], Path], layout: str, switches: list[str]
) -> None:
    settings = [*overrides(text, layout), ON, *switches]
    every, resharded = int(switches[0].split("=")[1]), switches[-1] not in GATHERED
    if "fsdp2" in layout:
        run_ranks(run_watched, 2, tmp_path, str(tmp_path / "run"), settings, every, resharded)
    else:
        run_ranks(run_plain, 2, tmp_path, str(tmp_path / "run"), settings)
    assert losses(tmp_path / "run") == losses(plain(layout))
    actual = checkpoint_state(tmp_path / "run/checkpoint/step-3")
    expected = checkpoint_state(plain(layout) / "checkpoint/step-3")
    assert actual.keys() == expected.keys()
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    assert [name for name in tensors if not torch.equal(actual[name], expected[name])] == []
    assert any(name.endswith("expert_bias_E") for name in tensors)
