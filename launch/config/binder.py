"""Plain data to typed settings, strictly.

The binder knows dataclasses, type hints and ``_target_`` and nothing else, so it serves our
settings and torchtitan's ``Config`` classes alike. It reports every problem it finds.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

from components.core.problems import Problem, shown
from launch.config.schema import hints_of, init_fields, section_class
from launch.config.targets import TARGET, locate, refuse_name
from launch.config.wording import (
    NoneType,
    advice,
    alternatives,
    describe,
    is_anything,
    is_section,
    unit_of,
)


class _Bad:
    """Returned in place of a value whose problems are already on the list."""


BAD = _Bad()


@dataclasses.dataclass(frozen=True)
class UnknownKey(Problem):
    """A key that the schema does not have.

    Attributes:
        section: dotted path it was written under.
        name: the key itself.
        siblings: the keys that its section has.
    """

    section: str = ""
    name: str = ""
    siblings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refused(Problem):
    """Values that a settings class does not take together.

    Attributes:
        about: dotted keys of the values it speaks of.
    """

    about: tuple[str, ...] = ()


class Binder:
    """Collects problems while binding.

    Attributes:
        problems: everything found so far, in the order of the data.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def bind(self, tp: Any, value: Any, path: str = "") -> Any:
        """Convert plain ``value`` to type ``tp``; ``BAD`` and a problem when it does not fit."""
        if isinstance(value, dict) and TARGET in value:
            return self._bind_target(tp, value, path)
        unit = unit_of(tp)
        if unit is not None:
            return self._attempt(lambda: unit.parse(value), lambda _: self._miss(tp, value, path))
        if get_origin(tp) is Annotated:
            return self.bind(get_args(tp)[0], value, path)
        if is_anything(tp):
            return value
        if len(alternatives(tp)) > 1:
            return self._bind_union(tp, value, path)
        origin = get_origin(tp) or tp
        if origin is Literal:
            fits = any(value == o and type(value) is type(o) for o in get_args(tp))
            return value if fits else self._miss(tp, value, path)
        if is_section(tp) and isinstance(value, dict):
            return self.construct(tp, value, path)
        if origin in (list, tuple) and isinstance(value, list | tuple):
            return self._bind_sequence(tp, value, path)
        if origin is dict and isinstance(value, dict):
            return self._bind_mapping(tp, value, path)
        return self._bind_plain(tp, value, path)

    def construct(self, cls: type, data: dict, path: str = "") -> Any:
        """Build dataclass ``cls`` from a mapping; ``BAD`` and problems when it does not fit.

        A nested mapping takes the class of the field's default instance, or of its annotation.
        """
        fields, hints = init_fields(cls), hints_of(cls)
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name not in fields:
                written = name if isinstance(name, str) else shown(name)
                self._unknown_key(written, path, list(fields))
                values[written] = BAD
                continue
            section = section_class(cls, name)
            tp = hints.get(name, Any)
            plain_section = isinstance(value, dict) and TARGET not in value
            # An annotation that leaves the class open is as narrow as the default's class.
            if section is not None and (plain_section or is_anything(tp)):
                tp = section
            values[name] = self.bind(tp, value, _join(path, name))
        for name, field in fields.items():
            required = field.default is field.default_factory is dataclasses.MISSING
            if required and name not in values:
                message = f"must be set: {describe(hints.get(name, Any))}"
                self.problems.append(Problem(_join(path, name), message))
                values[name] = BAD
        if BAD in values.values():
            return BAD
        return self._attempt(lambda: cls(**values), lambda e: self._refusal(e, path, values))

    def _bind_target(self, tp: Any, value: dict, path: str) -> Any:
        key = _join(path, TARGET)
        # A value of any type is plain data; a class can only stand where its base is declared.
        bases = tuple(option for option in alternatives(tp) if is_section(option))
        cls = locate(value[TARGET], key) if bases else refuse_name(value[TARGET], key)
        if isinstance(cls, Problem):
            self.problems.append(cls)
            return BAD
        if cls is None or not issubclass(cls, bases):
            message = f"{value[TARGET]!r} does not belong here"
            if not bases:
                takes = "plain values" if is_anything(tp) else describe(tp)
                message += f"; this key takes {takes}"
            self.problems.append(Problem(key, message))
            return BAD
        rest = {name: item for name, item in value.items() if name != TARGET}
        return self.construct(cls, rest, path)

    def _bind_union(self, tp: Any, value: Any, path: str) -> Any:
        options = alternatives(tp)
        if value is None and NoneType in options:
            return None
        trials: list[tuple[Any, Binder]] = []
        for option in options:
            trial = Binder()
            result = trial.bind(option, value, path)
            if not trial.problems:
                return result
            trials.append((option, trial))
        # The problems inside a mapping say more than "this is none of ...".
        mappings = [t for o, t in trials if is_section(o) or (get_origin(o) or o) is dict]
        if isinstance(value, dict) and len(mappings) == 1:
            self.problems += mappings[0].problems
            return BAD
        return self._miss(tp, value, path)

    def _bind_sequence(self, tp: Any, value: list | tuple, path: str) -> Any:
        args, kind = get_args(tp), get_origin(tp) or tp
        if kind is tuple and args and args[-1] is not Ellipsis:
            if len(args) != len(value):
                return self._miss(tp, value, path)
            types = list(args)
        else:
            types = [args[0] if args else Any] * len(value)
        pairs = zip(types, value, strict=True)
        items = [self.bind(item, v, f"{path}[{i}]") for i, (item, v) in enumerate(pairs)]
        return BAD if BAD in items else kind(items)

    def _bind_mapping(self, tp: Any, value: dict, path: str) -> Any:
        key_type, value_type = get_args(tp) or (Any, Any)
        bound = {
            self.bind(key_type, key, _join(path, key)): self.bind(value_type, v, _join(path, key))
            for key, v in value.items()
        }
        return BAD if BAD in (*bound, *bound.values()) else bound

    def _bind_plain(self, tp: Any, value: Any, path: str) -> Any:
        if tp is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        fits = isinstance(value, tp) if _is_class(tp) else False
        if isinstance(value, bool) and tp in (int, float):
            fits = False
        if isinstance(value, float) and not math.isfinite(value):
            fits = False
        return value if fits else self._miss(tp, value, path)

    def _miss(self, tp: Any, value: Any, path: str) -> _Bad:
        message = f"expected {describe(tp)}, got {shown(value)}"
        self.problems.append(Problem(path, message, advice(tp, value, path)))
        return BAD

    def _unknown_key(self, name: str, section: str, siblings: list[str]) -> None:
        message = "there is no such key"
        key = _join(section, name)
        self.problems.append(
            UnknownKey(key, message, section=section, name=name, siblings=tuple(siblings))
        )

    def _attempt(self, build: Callable[[], Any], report: Callable[[Exception], Any]) -> Any:
        try:
            return build()
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            report(error)
            return BAD

    def _refusal(self, error: Exception, path: str, values: dict[str, Any]) -> None:
        """Word what a settings class says about its values; its keys are found in its words."""
        # torchtitan speaks of its own command line: --compile.enable.
        text = re.sub(r"--(?=[a-z_]+\.)", "", str(error)) or type(error).__name__
        for value in values.values():
            if isinstance(value, tuple):
                text = text.replace(repr(value), shown(value))
        named = [name for name in values if re.search(rf"\b{re.escape(name)}\b", text)]
        about = tuple(_join(path, name) for name in named or values)
        if len(named) != 1:
            given = ", ".join(f"{name}: {shown(values[name])}" for name in named or values)
            self.problems.append(Refused(path, text, f"given: {given}", about=about))
            return
        name, value = named[0], shown(values[named[0]])
        message, own_words = re.subn(rf"^{name} (is|are) ", "", text)
        if not own_words:
            message = f"{value} is refused: {text}"
        self.problems.append(Refused(about[0], message, about=about))


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_class(tp: Any) -> bool:
    return isinstance(tp, type) and get_origin(tp) is None
