"""Variants of a model's parts that differ in the functions they call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torchtitan.config import derive

Functions = tuple[tuple[str, Callable], ...]
"""Names of a class's functions (``ClassVar``), and others for them."""


def module_class(config: Any) -> type:
    """The class that a config builds."""
    owner = type(config)._owner
    assert owner is not None
    return owner


def with_functions(config: Any, prefix: str, functions: Functions) -> Any:
    """The config of the same part, whatever class it is of, with other functions.

    Args:
        prefix: of the new class's name.
    """
    return derive(config, _variant(module_class(config), prefix, functions).Config)


@cache
def _variant(owner: Any, prefix: str, functions: Functions) -> Any:
    config: type = dataclass(kw_only=True, slots=True)(type("Config", (owner.Config,), {}))
    values = {name: staticmethod(function) for name, function in functions}
    return type(f"{prefix}{owner.__name__}", (owner,), {"Config": config, **values})
