"""What a component can reach: parts of the model, hooks, memory, resume, the schema."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.config import override
from torchtitan.config.override import apply_overrides, derive
from torchtitan.models.common.attention import FlexAttention, GQAttention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from components.core import registry
from components.core.base import Component, Inputs, MemoryTerm, Target
from components.core.registry import in_order
from components.full_recompute import FullRecompute
from components.titan.attention import SdpaAttention
from components.titan.build import prepare
from components.titan.dispatch import GlooTokenDispatcher
from components.titan.trainer import RecipeTrainer
from launch import resume, worker
from launch.config import freeze
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.summary import memory_terms, summarise
from tests.training import small_overrides, train, write_corpus


class OtherAttention(SdpaAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(SdpaAttention.Config):
        strength: int = 1


class OtherBlockAttention(GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass


@override(target=FlexAttention.Config, fqns=["*.layers.1.*"])
def other_in_second_layer(cfg: FlexAttention.Config, *, strength: int = 1) -> OtherAttention.Config:
    return derive(cfg, OtherAttention.Config, strength=strength)


@override(target=GQAttention.Config)
def whole_attention(cfg: GQAttention.Config) -> OtherBlockAttention.Config:
    return derive(cfg, OtherBlockAttention.Config)


@override(target=AllToAllTokenDispatcher.Config)
def other_dispatch(cfg: AllToAllTokenDispatcher.Config) -> GlooTokenDispatcher.Config:
    return derive(cfg, GlooTokenDispatcher.Config)


class Probe(Component):
    name = "probe"
    summary = "writes down what happens"
    scalars = {"probe/calls": "hooks called since the start"}

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.calls: list[str] = []

    def on_built(self, trainer: RecipeTrainer) -> None:
        self.calls.append(f"built at {trainer.step}")

    def before_step(self, trainer: RecipeTrainer) -> None:
        self.calls.append(f"step {trainer.step}")

    def after_step(self, trainer: RecipeTrainer) -> None:
        gradients = [p.grad is not None for p in trainer.model_parts[0].parameters()]
        self.calls.append(f"stepped with {all(gradients)}")

    def before_microbatch(self, trainer: RecipeTrainer) -> None:
        self.calls.append("pass")

    def prepare_inputs(self, trainer: RecipeTrainer, inputs: Inputs) -> Inputs:
        tokens, labels, extra = inputs
        assert tokens.shape == labels.shape and "positions" in extra
        self.calls.append("inputs")
        return inputs

    def after_microbatch(self, trainer: RecipeTrainer) -> None:
        self.calls.append("passed")

    def before_save(self, trainer: RecipeTrainer) -> None:
        self.calls.append("save")

    def metrics(self, trainer: RecipeTrainer) -> dict[str, float]:
        return {"probe/calls": len(self.calls)}

    def close(self) -> None:
        self.calls.append("closed")


def prepared(tmp_path: Path, *apply: Any, extra: tuple[str, ...] = (), world_size: int = 1) -> Any:
    """A run whose components are functions of the plan."""
    overrides = [*small_overrides(tmp_path / "corpus"), *extra]
    recipe = load_recipe(RECIPES / "quickstart.yaml", overrides).recipe

    class Applied(Component):
        name = "applied"

        def apply(self, plan: Any) -> None:
            for each in apply:
                each(plan)

    original = registry.enabled_components
    import components.titan.build as build

    build.enabled_components = lambda settings: [*original(settings), Applied(Component.Config())]
    try:
        return recipe, prepare(recipe, tmp_path, "cpu", world_size)
    finally:
        build.enabled_components = original


def attention_classes(run: Any) -> list[str]:
    run.config.model_spec.model.update_from_config(config=run.config)
    apply_overrides(run.config.override, run.config)
    layers = run.config.model_spec.model.layers
    return [type(layer.attention.inner_attention).__qualname__ for layer in layers]


def test_a_components_override_wins_over_our_default(tmp_path: Path) -> None:
    _, run = prepared(tmp_path, lambda plan: plan.override("a", other_in_second_layer, strength=3))
    assert attention_classes(run) == ["SdpaAttention.Config", "OtherAttention.Config"]
    assert run.config.model_spec.model.layers[1].attention.inner_attention.strength == 3
    # The next run of this process is not affected.
    _, run = prepared(tmp_path)
    assert attention_classes(run) == ["SdpaAttention.Config"] * 2


def test_inside_an_overridden_part_the_default_still_applies(tmp_path: Path) -> None:
    _, run = prepared(tmp_path, lambda plan: plan.override("a", whole_attention))
    assert attention_classes(run) == ["SdpaAttention.Config"] * 2
    layers = run.config.model_spec.model.layers
    assert {type(layer.attention) for layer in layers} == {OtherBlockAttention.Config}


def test_expert_exchange_may_be_replaced_on_a_cpu(tmp_path: Path) -> None:
    expert_parallel = ("parallelism.expert_parallel_degree=2",)
    replace = lambda plan: plan.override("a", other_dispatch)  # noqa: E731
    _, run = prepared(tmp_path, replace, extra=expert_parallel, world_size=2)
    run.config.model_spec.model.update_from_config(config=run.config)
    apply_overrides(run.config.override, run.config)


def test_two_components_cannot_replace_the_same_part(tmp_path: Path) -> None:
    def both(plan: Any) -> None:
        plan.override("first", other_in_second_layer)
        plan.override("second", other_in_second_layer)

    with pytest.raises(ValueError, match=r"second and components.first both replace .*layers\.1"):
        prepared(tmp_path, both)


def test_what_a_component_edits_stays_out_of_the_recipe(tmp_path: Path) -> None:
    def edit(plan: Any) -> None:
        plan.config.training.gc_freq += 1
        plan.recipe.parallelism.pipeline_parallel_schedule = "GPipe"

    overrides = small_overrides(tmp_path / "corpus")
    before = freeze.to_plain(load_recipe(RECIPES / "quickstart.yaml", overrides).recipe)
    recipe, run = prepared(tmp_path, edit)
    assert freeze.to_plain(recipe) == before
    assert run.config.training.gc_freq == before["training"]["gc_freq"] + 1


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    overrides = [
        *small_overrides(corpus),
        "training.steps=2",
        "training.local_batch_size=1",
        "training.global_batch_size=2",
    ]
    probe = Probe(Probe.Config())
    train(tmp_path / "run", overrides, components=[probe])
    one_pass = ["pass", "inputs", "passed"]
    one_step = [*one_pass, *one_pass, "stepped with True"]
    assert probe.calls == [
        "built at 0", "step 1", *one_step, "step 2", *one_step, "save", "closed",
    ]  # fmt: skip


def test_an_undescribed_scalar_is_an_error(tmp_path: Path) -> None:
    class Silent(Probe):
        scalars = {}

    corpus = write_corpus(tmp_path / "corpus")
    with pytest.raises(ValueError, match="without a line in a glossary: \\['probe/calls'\\]"):
        train(tmp_path / "run", small_overrides(corpus), components=[Silent(Probe.Config())])


def test_components_come_after_those_they_name() -> None:
    def component(name: str, *after: str) -> Component:
        cls = type(name, (Component,), {"name": name, "after": after})
        return cls(Component.Config())

    order = in_order([component("a", "c"), component("b"), component("c", "absent")])
    assert [each.name for each in order] == ["b", "c", "a"]
    with pytest.raises(RuntimeError, match="wait for each other: a, b"):
        in_order([component("a", "b"), component("b", "a")])


def test_memory_is_the_sum_of_terms_and_decides_the_result(monkeypatch: Any) -> None:
    recipe = load_recipe(RECIPES / "moe_120b_128k_16xh200_fsdp2.yaml", []).recipe
    target = Target("cuda", 16, 139 * 2**30)
    state, tables, hidden, loss = memory_terms(recipe, target)
    assert state.nbytes == 122_088_694_784 * 16 // 16
    # Cosines and sines for heads of 128 in float32, one table for all layers, on every rank.
    assert tables.nbytes == 131_072 * 2 * 128 * 4
    # 7 layers, 7,168 wide in bfloat16, one sequence over 16 ranks.
    cp = recipe.parallelism.context_parallel_degree
    assert hidden.nbytes == 7 * 7168 * 2 * 131_072 // cp
    # Logits of one of 16 chunks: bfloat16, float32 and a gradient in float32.
    chunks = recipe.components.chunked_loss.num_chunks
    assert loss.nbytes == 131_072 // cp // chunks * recipe.model.vocab_size * 10
    text = summarise(recipe, target)
    assert text.endswith("no problem found")
    device = sum(t.nbytes for t in (state, tables, hidden, loss)) / 2**30
    assert f"total        {device:.2f} of 139 GiB per rank on the device\n" in text
    unknown = summarise(recipe, Target("cuda", 16))
    assert unknown.endswith("not compared with a device, as hardware.memory is not set")

    saved = MemoryTerm("moments kept elsewhere", -(2**30), "device")
    grown = MemoryTerm("buffers", 30 * 2**30, "device")
    for kind in (Component, FullRecompute):
        monkeypatch.setattr(kind, "memory_terms", lambda self, recipe, target: [saved, grown])
    # Two components are on in this recipe.
    of_components = memory_terms(recipe, target)[2:-1]
    assert [t.nbytes for t in of_components] == [saved.nbytes, grown.nbytes] * 2
    assert "DO NOT FIT into the 139 GiB" in summarise(recipe, target)
    pinned = [MemoryTerm("moments", 2**30, "host")]
    monkeypatch.setattr(FullRecompute, "memory_terms", lambda self, recipe, target: pinned)
    assert " GiB per rank on the device, 1.00 GiB on the host\n" in summarise(recipe, target)


def test_bf16_moments_are_counted(tmp_path: Path) -> None:
    plain = load_recipe(RECIPES / "moe_120b_128k_16xh200.yaml", []).recipe
    halved = load_recipe(
        RECIPES / "moe_120b_128k_16xh200.yaml", ["optimizer.implementation=fused_opt_states_bf16"]
    ).recipe
    target = Target("cuda", 16)
    ratio = memory_terms(halved, target)[0].nbytes / memory_terms(plain, target)[0].nbytes
    assert ratio == pytest.approx(12 / 16)


def test_a_run_goes_on_only_with_the_same_inexact_techniques(monkeypatch: Any) -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml", []).recipe
    saved = {
        "components.chunked_loss.enabled": True,
        "components.full_recompute.enabled": True,
        "components.chunked_loss.num_chunks": 4,
        "optimizer.lr": 0.002,
    }
    now = freeze.to_plain(recipe)
    differing = {key for key, _, _ in resume.compare(saved, now) if key in saved}
    assert differing == set()
    chunked = registry.component_types()["chunked_loss"]
    monkeypatch.setattr(chunked, "changes_training", True)
    differing = {key for key, _, _ in resume.compare(saved, now) if key in saved}
    assert differing == {"components.chunked_loss.num_chunks"}


def test_a_run_goes_on_where_an_inexact_technique_is_new_and_off() -> None:
    off = {"components": {"indexer_fp8": {"enabled": False, "rotate": True}}}
    on = {"components": {"indexer_fp8": {"enabled": True, "rotate": True}}}
    was_on = {"components.indexer_fp8.enabled": True, "components.indexer_fp8.rotate": True}
    switch = "components.indexer_fp8.enabled"
    assert resume.compare({}, off) == []
    assert (switch, None, True) in resume.compare({}, on)
    assert resume.compare(was_on, off) == [(switch, True, False)]


def test_out_of_memory_advice_names_only_what_is_off() -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml", []).recipe
    text = worker.advice(recipe)
    assert "components.full_recompute.enabled=true (less memory for activations)" in text
    assert "chunked_loss" not in text
    assert f"training.seq_len below {recipe.training.seq_len}" in text


def test_prepare_inputs_sees_tensors_of_the_step(tmp_path: Path) -> None:
    class Blank(Probe):
        def prepare_inputs(self, trainer: RecipeTrainer, inputs: Inputs) -> Inputs:
            tokens, labels, extra = inputs
            return torch.zeros_like(tokens), labels, extra

    corpus = write_corpus(tmp_path / "corpus")
    overrides = [*small_overrides(corpus), "training.steps=1"]
    losses = []
    for components in ([], [Blank(Probe.Config())]):
        run = tmp_path / str(len(components))
        train(run, overrides, components=components)
        losses.append((run / "metrics.jsonl").read_text().split('"train/loss": ')[1].split(",")[0])
    assert losses[0] != losses[1]
