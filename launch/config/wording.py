"""Types in words: what a value may be, and what a user who wrote another probably meant."""

import dataclasses
import math
import re
import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from components.core.problems import did_you_mean, shown
from components.core.units import Unit

NoneType = type(None)
_WORDS = {
    int: "an integer", float: "a number", str: "a string", bool: "true or false",
    NoneType: "null", list: "a list", tuple: "a list", dict: "a mapping",
}  # fmt: skip
_SWITCHES = {"on", "off", "yes", "no", "true", "false"}
_YAML_SWITCH = "YAML reads on, off, yes and no as true and false; quote the word to keep it"


def alternatives(tp: Any) -> list[Any]:
    """The members of a union, flattened; a list of one for any other type."""
    if get_origin(tp) is Annotated and unit_of(tp) is None:
        return alternatives(get_args(tp)[0])
    if get_origin(tp) in (Union, types.UnionType):
        return [leaf for member in get_args(tp) for leaf in alternatives(member)]
    return [tp]


def unit_of(tp: Any) -> Unit | None:
    """The unit an annotated integer type carries, if any."""
    if get_origin(tp) is not Annotated:
        return None
    return next((extra for extra in get_args(tp)[1:] if isinstance(extra, Unit)), None)


def is_section(tp: Any) -> bool:
    """Whether a value of this type is written as a section of keys."""
    return isinstance(tp, type) and dataclasses.is_dataclass(tp)


def is_anything(tp: Any) -> bool:
    """Whether this type leaves the value open."""
    return tp is Any or isinstance(tp, typing.TypeVar)


def describe(tp: Any) -> str:
    """What a value of this type may be, in words a user can act on."""
    found = list(dict.fromkeys(_describe_one(option) for option in alternatives(tp)))
    if _WORDS[float] in found and _WORDS[int] in found:
        found.remove(_WORDS[int])
    return " or ".join(found)


def _describe_one(tp: Any) -> str:
    unit = unit_of(tp)
    if unit is not None:
        return f"{unit.what} such as {unit.examples}"
    if is_anything(tp):
        return "any value"
    if is_section(tp):
        return "a section of keys"
    origin, args = get_origin(tp) or tp, get_args(tp)
    if origin is Literal:
        words = [value if isinstance(value, str) else shown(value) for value in args]
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = list(dict.fromkeys(describe(arg) for arg in args))
        return f"a list of {len(args)}, each {' or '.join(items)}"
    if origin in (list, tuple) and args:
        return f"a list, each item {describe(args[0])}"
    return _WORDS.get(origin, "an object that only Python code can give")


def advice(tp: Any, value: Any, path: str) -> str:
    """One way out for a user who gave ``value`` to a key of another type; "" without an idea."""
    options = alternatives(tp)
    literals = [v for option in options if get_origin(option) is Literal for v in get_args(option)]
    words = [str(option) for option in literals]
    if any(is_section(option) for option in options):
        return _section_advice(options, value, path)
    if isinstance(value, str):
        return _text_advice(options, words, value)
    if isinstance(value, bool):
        return _YAML_SWITCH if words or str in options else ""
    if isinstance(value, float) and not math.isfinite(value):
        return "numbers are finite here"
    if isinstance(value, float) and int in options and value.is_integer():
        return f"write {int(value)}"
    if str in options and isinstance(value, int | float):
        return f"""quote it to make it text: "{value}" in a file, '"{value}"' in the shell"""
    if any(_is_open_list(option) for option in options) and not isinstance(value, list | dict):
        return f"for a list of one, write [{shown(value)}]"
    return ""


def _section_advice(options: list[Any], value: Any, path: str) -> str:
    sections = [option for option in options if is_section(option)]
    if value is None:
        return "indent the section's keys below it, or leave it out"
    switches = any(f.name == "enabled" for cls in sections for f in dataclasses.fields(cls))
    if switches and str(value).lower() in _SWITCHES:
        switch = "true" if str(value).lower() in ("on", "yes", "true") else "false"
        return f"did you mean {path}.enabled={switch}?"
    return "its keys stand below it, indented, each as `key: value`"


def _text_advice(options: list[Any], words: list[str], text: str) -> str:
    if words and (guess := did_you_mean(text, words)):
        return guess
    if NoneType in options and text.lower() in ("none", "null", ""):
        return "write null, without quotes"
    if bool in options and text.lower() in _SWITCHES:
        return "write true or false, without quotes"
    if (int in options or float in options) and _is_number(text):
        return "write it without quotes"
    if int in options and re.fullmatch(r"[\d_.]+\s*[A-Za-z]+", text):
        return "this key takes no unit; write the number out"
    if any(_is_open_list(option) for option in options):
        return f"for a list of one, write [{text}]"
    return ""


def _is_open_list(tp: Any) -> bool:
    """Whether lists of any length are legal."""
    origin, args = get_origin(tp) or tp, get_args(tp)
    return origin is list or (origin is tuple and (not args or args[-1] is Ellipsis))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
