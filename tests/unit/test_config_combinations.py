"""Combinations that need a model, or machines, of their own to show."""

import pytest

from components.core.problems import RecipeError
from launch.config.groups import RECIPES
from launch.ready import Ready
from launch.summary import memory_terms


def test_gpt_oss_experts_in_fp32_are_refused() -> None:
    recipe = RECIPES / "gpt_oss_20b_128k_8xh200.yaml"
    Ready(recipe, [], None, anywhere=True)
    with pytest.raises(RecipeError) as refusal:
        Ready(recipe, ["training.mixed_precision_param=float32"], None, anywhere=True)
    (problem,) = refusal.value.problems
    assert problem.path == "training.mixed_precision_param"
    assert problem.message.endswith("use bfloat16")


def test_a_machine_must_hold_what_all_components_of_all_its_ranks_keep_there() -> None:
    on = ("layer_recompute", "selective_checkpoint_offload", "offload_stream_adamw")
    overrides = [f"components.{name}.enabled=true" for name in on]
    overrides += ["components.full_recompute.enabled=false", "hardware.ranks_per_node=8"]
    recipe = RECIPES / "moe_120b_128k_16xh200_fsdp2.yaml"
    ready = Ready(recipe, overrides, None, anywhere=True)
    terms = [t for t in memory_terms(ready.recipe, ready.target) if t.where == "host"]
    assert len(terms) == 2 and all(term.nbytes > 2**29 for term in terms)
    whole = 8 * sum(term.nbytes for term in terms)
    Ready(recipe, [*overrides, f"hardware.host_memory={whole}"], None, anywhere=True)
    with pytest.raises(RecipeError) as refusal:
        Ready(recipe, [*overrides, f"hardware.host_memory={whole - 1}"], None, anywhere=True)
    (problem,) = refusal.value.problems
    assert problem.path == "hardware.host_memory"
    assert f"{whole / 2**30:.2f} GiB of its 8 ranks" in problem.message
    for term in terms:
        assert f"{term.name}, {term.nbytes / 2**30:.2f} GiB" in problem.message
