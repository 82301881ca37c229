"""What a recipe may contain: dotted keys, their types in words, defaults and documentation.

Everything is read off the dataclasses themselves (ours and torchtitan's), so that no key is ever
listed by hand.
"""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from components.core.units import Count, Tokens
from launch.config.wording import NoneType, alternatives, describe, is_section

# torchtitan's own integer fields that people write with a unit. Fields of our classes say it in
# their annotation instead.
TITAN_UNITS = {
    ("TrainingConfig", "seq_len"): Tokens,
    ("TrainingConfig", "steps"): Count,
    ("LRSchedulersContainer.Config", "warmup_steps"): Count,
    ("LRSchedulersContainer.Config", "total_steps"): Count | None,
}


@dataclasses.dataclass(frozen=True)
class Key:
    """One leaf of the schema.

    Attributes:
        path: dotted key.
        legal: what the value may be, in words.
        default: the value when no file sets it, or ``dataclasses.MISSING``.
        doc: the text under the field in its dataclass.
        owner: class that declares it.
    """

    path: str
    legal: str
    default: Any
    doc: str
    owner: str


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass (or the signature of a function) by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    titan = {c.__qualname__ for c in cls.__mro__ if c.__module__.startswith("torchtitan.")}
    for (owner, name), unit in TITAN_UNITS.items():
        if owner in titan:
            hints[name] = unit
    return hints


def init_fields(cls: type) -> dict[str, dataclasses.Field]:
    """Fields a user may set: constructor fields whose name is not private."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")}


def default_of(field: dataclasses.Field) -> Any:
    """The field's default value, or ``dataclasses.MISSING``."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def section_class(cls: type, name: str) -> type | None:
    """The dataclass a plain mapping under ``cls.name`` is bound to, or None for a leaf.

    A field's default instance decides; its annotation does where there is no such default.
    """
    default = default_of(init_fields(cls)[name])
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return type(default)
    options = [tp for tp in alternatives(hints_of(cls).get(name, Any)) if tp is not NoneType]
    return options[0] if len(options) == 1 and is_section(options[0]) else None


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field, inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_own_field_docs(base))
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, text in zip(body, body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = " ".join(doc.split())
    return docs


def walk(cls: type, prefix: str = "", classes: dict[str, type] | None = None) -> Iterator[Key]:
    """Every leaf key below ``cls``.

    Args:
        cls: a dataclass.
        prefix: dotted path of ``cls`` itself.
        classes: dotted path -> class, for sections whose class a recipe chose with ``_target_``.
    """
    hints, docs, classes = hints_of(cls), field_docs(cls), classes or {}
    for name, field in init_fields(cls).items():
        path = f"{prefix}.{name}" if prefix else name
        section = classes.get(path) or section_class(cls, name)
        if section is not None:
            yield from walk(section, path, classes)
        else:
            legal = describe(hints.get(name, Any))
            yield Key(path, legal, default_of(field), docs.get(name, ""), cls.__qualname__)
