"""Combinations that need a model of their own to show."""

import pytest

from components.core.problems import RecipeError
from launch.config.groups import RECIPES
from launch.ready import Ready


def test_gpt_oss_experts_in_fp32_are_refused() -> None:
    recipe = RECIPES / "gpt_oss_20b_128k_8xh200.yaml"
    Ready(recipe, [], None, anywhere=True)
    with pytest.raises(RecipeError) as refusal:
        Ready(recipe, ["training.mixed_precision_param=float32"], None, anywhere=True)
    (problem,) = refusal.value.problems
    assert problem.path == "training.mixed_precision_param"
    assert problem.message.endswith("use bfloat16")
