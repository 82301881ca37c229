"""What a recipe may contain: dotted keys, their types in words, defaults and documentation.

Everything is read off the dataclasses themselves (ours and torchtitan's), so that no key is ever
listed by hand.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from components.core.units import Unit

# torchtitan's own integer fields that people write with a unit. Fields of our classes say it in
# their annotation instead.
TITAN_UNITS = {
    ("TrainingConfig", "seq_len"): "TOKENS",
    ("TrainingConfig", "steps"): "COUNT",
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
    for (owner, name), unit in TITAN_UNITS.items():
        if cls.__name__ == owner and cls.__module__.startswith("torchtitan.") and name in hints:
            hints[name] = Annotated[int, _unit(unit)]
    return hints


def _unit(name: str) -> Unit:
    import components.core.units as units

    return getattr(units, name)


def alternatives(tp: Any) -> list[Any]:
    """The members of a union, flattened; a list of one for any other type."""
    if get_origin(tp) is Annotated and not _units_in(tp):
        return alternatives(get_args(tp)[0])
    if get_origin(tp) in (Union, types.UnionType):
        return [leaf for member in get_args(tp) for leaf in alternatives(member)]
    return [tp]


def _units_in(tp: Any) -> list[Unit]:
    return [extra for extra in get_args(tp)[1:] if isinstance(extra, Unit)]


def unit_of(tp: Any) -> Unit | None:
    """The unit an annotated integer type carries, if any."""
    if get_origin(tp) is not Annotated:
        return None
    return next(iter(_units_in(tp)), None)


def describe(tp: Any) -> str:
    """What a value of this type may be, in words a user can act on."""
    unit = unit_of(tp)
    if unit is not None:
        return f"a number of {unit.name}, like {unit.examples}"
    options = alternatives(tp)
    if len(options) > 1:
        return " or ".join(dict.fromkeys(describe(option) for option in options))
    tp = options[0]
    origin = get_origin(tp)
    if origin is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(tp))
    if dataclasses.is_dataclass(tp):
        return f"a mapping ({type_name(tp)})"
    if origin in (list, tuple) or tp in (list, tuple):
        items = [arg for arg in get_args(tp) if arg is not Ellipsis]
        return f"a list of {describe(items[0])}" if items else "a list"
    if origin is dict or tp is dict:
        return "a mapping"
    plain = {
        int: "an integer", float: "a number", str: "a string", bool: "true or false",
        type(None): "null", Any: "any value",
    }  # fmt: skip
    return plain.get(tp, type_name(tp))


def type_name(tp: Any) -> str:
    """A short readable name; nested ``Config`` classes keep their owner's name."""
    return getattr(tp, "__qualname__", None) or str(tp)


def init_fields(cls: type) -> dict[str, dataclasses.Field]:
    """Fields a user may set: constructor fields whose name is not private."""
    return {
        f.name: f for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")
    }


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
    classes = [tp for tp in alternatives(hints_of(cls).get(name, Any)) if _is_dataclass_type(tp)]
    return classes[0] if len(classes) == 1 else None


def _is_dataclass_type(tp: Any) -> bool:
    return isinstance(tp, type) and dataclasses.is_dataclass(tp)


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
    docs = {}
    for field, text in zip(body, body[1:], strict=False):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        is_doc = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if named and is_doc and isinstance(text.value.value, str):
            docs[field.target.id] = " ".join(text.value.value.split())
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
            yield Key(path, legal, default_of(field), docs.get(name, ""), type_name(cls))
