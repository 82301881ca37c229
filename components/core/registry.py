"""Find the components: every ``Component`` subclass in a module of this package, or in a module
``component`` of a package in it."""

import dataclasses
import importlib
import importlib.util
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import components
from components.core.base import Component, MemoryTerm, Target
from components.core.sizes import logits

if TYPE_CHECKING:
    from components.core.recipe import Recipe


@cache
def component_types() -> dict[str, type[Component]]:
    """Component classes by name, in alphabetical order.

    Raises:
        RuntimeError: a module defines none or several, or two share a name.
    """
    found: dict[str, type[Component]] = {}
    for module_info in pkgutil.iter_modules([str(Path(components.__file__).parent)]):
        name = f"components.{module_info.name}"
        if module_info.ispkg:
            name = f"{name}.component"
            if importlib.util.find_spec(name) is None:
                continue
        module = importlib.import_module(name)
        own = [
            member
            for member in vars(module).values()
            if isinstance(member, type)
            and issubclass(member, Component)
            and member.__module__ == module.__name__
        ]
        if len(own) != 1:
            raise RuntimeError(f"{module.__name__} must define one Component, not {len(own)}")
        if own[0].name != module_info.name:
            raise RuntimeError(
                f"{module.__name__} defines the component {own[0].name!r}; a component's name is "
                "its module's or its package's name"
            )
        found[own[0].name] = own[0]
    return dict(sorted(found.items()))


@cache
def settings_class() -> type:
    """The dataclass behind a recipe's ``components:`` section: one field per component."""
    fields = [
        (name, cls.Config, dataclasses.field(default_factory=cls.Config))
        for name, cls in component_types().items()
    ]
    return dataclasses.make_dataclass("Components", fields, kw_only=True, slots=True)


def enabled_components(settings: object) -> list[Component]:
    """Build the components that a bound ``components:`` section switches on, in order of use.

    Args:
        settings: an instance of ``settings_class()``.

    Raises:
        RuntimeError: ``Component.after`` goes round in a circle.
    """
    configs = [getattr(settings, name) for name in component_types()]
    return in_order([config.build() for config in configs if config.enabled])


def in_order(components_on: list[Component]) -> list[Component]:
    """Alphabetical, except that each comes after those it names in ``after``."""
    waiting = {component.name: component for component in components_on}
    ordered: list[Component] = []
    while waiting:
        ready = [c for c in waiting.values() if not any(name in waiting for name in c.after)]
        if not ready:
            raise RuntimeError(f"components wait for each other: {', '.join(waiting)}")
        ordered.append(waiting.pop(ready[0].name))
    return ordered


def loss_term(recipe: "Recipe", target: Target) -> MemoryTerm:
    """What one rank needs while the loss is computed; no layer runs then."""
    found = [c.loss_term(recipe, target) for c in enabled_components(recipe.components)]
    stock = MemoryTerm("logits and their gradient, while the loss is computed", logits(recipe))
    return next((term for term in found if term is not None), stock)
