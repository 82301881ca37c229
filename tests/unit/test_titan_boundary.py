"""Only components/titan may know torchtitan's private names."""

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torchtitan

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "components/titan"
FOLDERS = ("components", "data", "kernels", "launch", "recipes", "tests")


def sources() -> list[Path]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if not file.is_relative_to(ADAPTER)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_names() -> frozenset[str]:
    """Every private function, class, method and variable that torchtitan defines."""
    found: set[str] = set()
    root = Path(torchtitan.__file__).parent
    # Its experiments set private names of other libraries, which are none of its own.
    for file in (f for f in root.rglob("*.py") if "experiments" not in f.parts):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
    return frozenset(name for name in found if is_private(name))


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every private name of torchtitan that a module imports or reads."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if is_titan(module):
                for alias in names:
                    if any(map(is_private, (*module.split("."), alias.name))):
                        yield node.lineno, alias.name
                    else:
                        known[alias.asname or alias.name] = imported(module, alias.name)
            case ast.Import(names=names):
                for alias in names:
                    if is_titan(alias.name) and any(map(is_private, alias.name.split("."))):
                        yield node.lineno, alias.name
            case ast.Attribute(value=owner, attr=name) if name in private_names():
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    yield node.lineno, name
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if name in private_names():
                yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from inherited_uses(node, known)


def is_titan(module: str) -> bool:
    return module.partition(".")[0] == "torchtitan"


def imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name, None)


def inherited_uses(cls: ast.ClassDef, known: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Private names of its torchtitan bases that a class overrides or reads off itself."""
    bases = [known[base.id] for base in cls.bases if isinstance(base, ast.Name) if base.id in known]
    theirs = {name for base in bases for name in dir(base) if is_private(name)}
    for node in ast.walk(cls):
        match node:
            case ast.FunctionDef(name=name) | ast.Attribute(attr=name) if name in theirs:
                yield node.lineno, name


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_of_torchtitan_stay_in_the_adapter(file: Path) -> None:
    found = [f"line {line}: {name}" for line, name in uses(ast.parse(file.read_text()))]
    assert not found, f"move to components/titan: {'; '.join(found)}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torchtitan.config.override import _REGISTRY", "_REGISTRY"),
        ("from torchtitan._private import x", "x"),
        ("import torchtitan._private", "torchtitan._private"),
        ("from torchtitan.config import override\noverride._REGISTRY", "_REGISTRY"),
        ("def f(router): router._debug_force_load_balance = True", "_debug_force_load_balance"),
        ("getattr(thing, '_REGISTRY')", "_REGISTRY"),
        (
            "from torchtitan.components.checkpointer import CheckpointManager\n"
            "class Mine(CheckpointManager):\n"
            "    def _should_save(self): ...",
            "_should_save",
        ),
        (
            "from torchtitan.components.checkpointer import CheckpointManager\n"
            "class Mine(CheckpointManager):\n"
            "    def now(self): return self._find_load_step()",
            "_find_load_step",
        ),
    ],
)
def test_a_private_name_is_found_however_it_is_reached(source: str, name: str) -> None:
    assert name in [found for _, found in uses(ast.parse(source))]


def test_public_names_and_private_ones_of_our_own_are_free() -> None:
    source = (
        "from torchtitan.components.checkpointer import CheckpointManager\n"
        "class Mine(CheckpointManager):\n"
        "    def now(self): return self._our_own_thing() + self.save(3)"
    )
    assert list(uses(ast.parse(source))) == []
