"""The component that trains indexers: what it changes, and what it must not."""

from pathlib import Path

import pytest
import torch

from components.core.base import Target
from components.titan.trainer import RecipeTrainer
from kernels.dsa import absorbed, indexer_loss
from launch.config.load import load_recipe
from launch.summary import memory_terms
from tests.training import full, metrics, small_overrides, train, write_corpus
from tests.unit.absorbed_support import Gathering, offer

ON = ["components.indexer_training.enabled=true"]
ONLY = [*ON, "components.indexer_training.only=true"]
SEVEN = ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias",
         "compress_ape", "compress_gate")  # fmt: skip


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = write_corpus(tmp_path_factory.mktemp("indexers") / "corpus")
    # Few pools per query, so that choosing them decides something in 128 tokens.
    return [*small_overrides(corpus), "model=glm_flash_tiny", "model.index_topk=16"]


def weights(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    parameters = trainer.model_parts[0].named_parameters()
    return {name: full(parameter) for name, parameter in parameters}


def gradients_of_one_step(trainer: RecipeTrainer) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}

    def keep(*unused: object) -> None:
        for name, parameter in trainer.model_parts[0].named_parameters():
            plain = name.replace("_checkpoint_wrapped_module.", "")
            found[plain] = None if parameter.grad is None else full(parameter.grad)

    trainer.optimizers.register_step_pre_hook(keep)
    trainer.train()
    return found


def is_indexer(name: str) -> bool:
    return ".indexer." in name


def test_off_means_no_gradient_no_state_and_no_change(tmp_path: Path, overrides: list[str]):
    def use(trainer: RecipeTrainer) -> None:
        before = weights(trainer)
        gradients = gradients_of_one_step(trainer)
        after = weights(trainer)
        for name in before:
            assert (gradients[name] is None) == is_indexer(name), name
            if is_indexer(name):
                assert torch.equal(before[name], after[name]), name
        trained = {id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"]}
        for name, parameter in trainer.model_parts[0].named_parameters():
            assert (id(parameter) in trained) != is_indexer(name), name

    train(tmp_path, [*overrides, "training.steps=2"], use=use)


def test_on_reaches_all_seven_tensors_and_leaves_every_other_gradient(
    tmp_path: Path, overrides: list[str]
):
    one_step = [*overrides, "training.steps=1"]
    off = train(tmp_path / "off", one_step, use=gradients_of_one_step)
    on = train(tmp_path / "on", [*one_step, *ON], use=gradients_of_one_step)
    reached = {name.split(".indexer.")[1] for name in on if is_indexer(name)}
    assert reached == set(SEVEN)
    for name, gradient in on.items():
        if is_indexer(name):
            assert gradient is not None and gradient.abs().max() > 0, name
        else:
            # The gradients are clipped to a norm that the indexers' now have a part in.
            assert gradient is not None and off[name] is not None
            scale = gradient.norm() / off[name].norm()
            torch.testing.assert_close(gradient, off[name] * scale, rtol=1e-5, atol=1e-9)


def test_only_trains_the_indexers_and_nothing_else(tmp_path: Path, overrides: list[str]):
    def use(trainer: RecipeTrainer) -> None:
        # Attention that prefers some tokens, as a trained one does; at first it is nearly even.
        for name, parameter in trainer.model_parts[0].named_parameters():
            if "q_b_proj" in name or "kv_b_proj" in name or "kv_a_proj" in name:
                parameter.detach().mul_(8)
        before, buffers = weights(trainer), dict(trainer.model_parts[0].named_buffers())
        biases = {n: full(b) for n, b in buffers.items() if "expert_bias" in n}
        gradients = gradients_of_one_step(trainer)
        after = weights(trainer)
        for name in before:
            assert (gradients[name] is None) != is_indexer(name), name
            assert torch.equal(before[name], after[name]) != is_indexer(name), name
        assert biases
        for name, bias in biases.items():
            assert torch.equal(bias, full(trainer.model_parts[0].get_buffer(name))), name
        state = [p for o in trainer.optimizers for p in o.state]
        names = {id(p): n for n, p in trainer.model_parts[0].named_parameters()}
        assert state and all(is_indexer(names[id(p)]) for p in state)

    steps = "training.steps=12"
    lr = ["optimizer.lr=3e-3", "lr_scheduler.total_steps=12"]
    train(tmp_path, [*overrides, *ONLY, steps, *lr], use=use)
    kl = [line["indexer/kl"] for line in metrics(tmp_path) if "indexer/kl" in line]
    assert len(kl) == 12
    assert sum(kl[-3:]) < 0.9 * sum(kl[:3])


@pytest.mark.parametrize("support", ["selected", "visible"])
def test_recomputation_changes_no_gradient_and_counts_once(
    tmp_path: Path, overrides: list[str], support: str
):
    settings = [*overrides, *ON, "training.steps=1"]
    settings.append(f"components.indexer_training.support={support}")
    recompute = "components.full_recompute.enabled=true"
    kept = train(tmp_path / "kept", settings, use=gradients_of_one_step)
    again = train(tmp_path / "again", [*settings, recompute], use=gradients_of_one_step)
    for name, gradient in kept.items():
        assert gradient is not None and again[name] is not None
        torch.testing.assert_close(again[name], gradient, rtol=1e-6, atol=1e-9)
    (one,), (other,) = (
        [line["indexer/kl"] for line in metrics(tmp_path / run) if "indexer/kl" in line]
        for run in ("kept", "again")
    )
    assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.slow
def test_a_kernel_teaches_under_recomputation_what_the_plain_attention_does(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with few queries at a time, as ``model.sparse_mla_chunk`` asks for."""
    settings = [*overrides, *ON, "training.steps=1", "components.layer_recompute.enabled=true"]
    plain = train(tmp_path / "plain", settings, use=gradients_of_one_step)
    kernels = Gathering()
    offer(monkeypatch, kernels, "tilelang")
    monkeypatch.delattr(indexer_loss, "Selected")
    few = ["model.sparse_mla_kernel=auto", "model.sparse_mla_chunk=131072"]
    found = train(tmp_path / "kernel", [*settings, *few], use=gradients_of_one_step)
    assert kernels.calls.count("backward") >= 4
    for name, gradient in plain.items():
        assert gradient is not None and found[name] is not None
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    (one,), (other,) = (
        [line["indexer/kl"] for line in metrics(tmp_path / run) if "indexer/kl" in line]
        for run in ("plain", "kernel")
    )
    # Sums of small differences of logarithms, in float32.
    assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize(
    ("setting", "tokens", "mass"),
    [("selected", 8192, 4 * 512), ("selected", 1024, 4 * 256), ("visible", 8192, 0)],
    ids=str,
)
def test_the_plan_has_the_probabilities_that_a_kernel_writes_down(
    setting: str, tokens: int, mass: int
) -> None:
    """A query has as many pools as its document, at most."""
    recipes = Path(__file__).parents[2] / "recipes"
    support = f"components.indexer_training.support={setting}"
    settings = [*ON, support, f"training.seq_len={tokens}"]
    recipe = load_recipe(recipes / "glm_flash_4layer_8k_1xh200.yaml", settings).recipe
    recipe.model.sparse_mla_kernel = "tilelang"
    found = {t.name: t.nbytes for t in memory_terms(recipe, Target("cuda", 1))}
    keys = tokens // 4 * 128 * 4
    expected = tokens * mass + keys + absorbed.CHUNK_BYTES
    assert found["the indexers' loss, in one layer's backward"] == expected
