"""A typed recipe back to plain data: the one file that every rank reads and anyone can replay."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from components.core.recipe import Recipe
from launch.config.schema import init_fields, section_class
from launch.config.targets import TARGET


def to_plain(value: Any) -> Any:
    """Dataclasses to nested dicts; a section whose class is not the default names its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _field(value, name) for name in init_fields(type(value))}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _field(owner: Any, name: str) -> Any:
    value = getattr(owner, name)
    plain = to_plain(value)
    if dataclasses.is_dataclass(value) and type(value) is not section_class(type(owner), name):
        cls = type(value)
        return {TARGET: f"{cls.__module__}.{cls.__qualname__}", **plain}
    return plain


class _Dumper(yaml.SafeDumper):
    """Quotes text such as "1e-3", which PyYAML reads as text and OmegaConf as a number."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _represent_text)


def write(recipe: Recipe, path: Path, header: list[str]) -> None:
    """Write the resolved recipe as YAML, every key present, with comment lines on top."""
    text = yaml.dump(to_plain(recipe), Dumper=_Dumper, sort_keys=False, width=100)
    path.write_text("".join(f"# {line}\n" for line in header) + text, encoding="utf-8")
