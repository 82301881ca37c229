"""What the README shows works as shown."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import components
from components.core import registry
from launch.config.groups import ROOT
from launch.ready import Ready

README = (ROOT / "README.md").read_text()


def block(language: str, contains: str) -> str:
    """The fenced block that holds some text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)
    (found,) = [text for text in blocks if contains in text]
    return found


def test_the_recipe_passes_every_check(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    text = block("yaml", "override /model: moe_tiny")
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"corpus/{name}.jsonl").write_text('{"text": "x"}\n')
    text = text.replace("corpus/*.jsonl", f"{tmp_path}/corpus/*.jsonl")
    recipe.write_text(text)
    ready = Ready(recipe, [], None, anywhere=True)
    assert ready.recipe.training.seq_len == 16 * 1024


def test_the_extended_context_passes_every_check(tmp_path: Path) -> None:
    recipe = tmp_path / "longer.yaml"
    text = block("yaml", "scaling: yarn")
    (path,) = re.findall(r"initial_load_path: (\S+)", text)
    (tmp_path / "step-1000").mkdir()
    recipe.write_text(text.replace(path, f"{tmp_path}/step-1000"))
    ready = Ready(recipe, [], None, anywhere=True)
    assert ready.recipe.training.seq_len == ready.recipe.model.position.longest == 512 * 1024
    gpt_oss = README.split("make train RECIPE=gpt_oss_20b_128k_8xh200 ")[1].split("`")[0].split()
    ready = Ready(ROOT / "recipes/gpt_oss_20b_128k_8xh200.yaml", gpt_oss, None, anywhere=True)
    assert ready.recipe.training.seq_len == ready.recipe.model.max_seq_len == 256 * 1024


def test_the_components_table_is_complete() -> None:
    for name, cls in registry.component_types().items():
        assert f"| `{name}` | {cls.summary} | {cls.source} |" in README


def test_the_example_component_is_found_checked_and_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "components"
    folder.mkdir()
    file = folder / "selective_recompute.py"
    file.write_text(block("python", "class SelectiveRecompute"))
    spec = importlib.util.spec_from_file_location("components.selective_recompute", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "components.selective_recompute", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(components, "__file__", str(folder / "__init__.py"))
    registry.component_types.cache_clear()
    registry.settings_class.cache_clear()
    try:
        assert list(registry.component_types()) == ["selective_recompute"]
        settings = registry.settings_class()()
        settings.selective_recompute.enabled = True
        (component,) = registry.enabled_components(settings)
        assert component.path == "components.selective_recompute"
    finally:
        registry.component_types.cache_clear()
        registry.settings_class.cache_clear()
