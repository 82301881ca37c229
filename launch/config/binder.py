"""Plain data to typed settings, strictly.

The binder knows dataclasses, type hints and ``_target_`` and nothing else, so it serves our
settings and torchtitan's ``Config`` classes alike. It reports every problem it finds.
"""

import dataclasses
import importlib
import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from components.core.problems import Problem, did_you_mean
from launch.config.schema import (
    alternatives,
    describe,
    hints_of,
    init_fields,
    section_class,
    type_name,
    unit_of,
)

OUR_PACKAGES = ("components", "data", "kernels")
TARGET = "_target_"


class _Bad:
    """Returned in place of a value whose problems are already on the list."""


BAD = _Bad()
T = TypeVar("T")


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
            return self._attempt(path, lambda: unit.parse(value), f"expected {describe(tp)}", value)
        origin = get_origin(tp)
        if origin is Annotated:
            return self.bind(get_args(tp)[0], value, path)
        if tp is Any or isinstance(tp, TypeVar):
            return value
        if origin in (Union, types.UnionType):
            return self._bind_union(tp, value, path)
        if origin is Literal:
            return value if self._is_literal(tp, value) else self._mismatch(tp, value, path)
        if isinstance(tp, type) and dataclasses.is_dataclass(tp):
            if isinstance(value, dict):
                return self.construct(tp, value, path)
            return self._mismatch(tp, value, path)
        if origin in (list, tuple) or tp in (list, tuple):
            return self._bind_sequence(tp, value, path)
        if origin is dict or tp is dict:
            return self._bind_mapping(tp, value, path)
        return self._bind_plain(tp, value, path)

    def construct(self, cls: type[T], data: dict, path: str = "") -> T | _Bad:
        """Build dataclass ``cls`` from a mapping.

        A nested mapping takes the class of the field's default instance, or of its annotation.
        """
        fields, hints = init_fields(cls), hints_of(cls)
        kwargs: dict[str, Any] = {}
        for name, value in data.items():
            key = f"{path}.{name}" if path else str(name)
            if name not in fields:
                self._unknown_key(str(name), key, list(fields))
                kwargs[name] = BAD
                continue
            section = section_class(cls, name)
            if section is not None and isinstance(value, dict) and TARGET not in value:
                kwargs[name] = self.construct(section, value, key)
            else:
                kwargs[name] = self.bind(hints.get(name, Any), value, key)
        for name, field in fields.items():
            required = dataclasses.MISSING in (field.default, field.default_factory)
            required = required and field.default is field.default_factory
            if required and name not in kwargs:
                key = f"{path}.{name}" if path else name
                legal = describe(hints.get(name, Any))
                self.problems.append(Problem(key, f"must be set: {legal}"))
                kwargs[name] = BAD
        if BAD in kwargs.values():
            return BAD
        return self._attempt(path, lambda: cls(**kwargs), f"{type_name(cls)} refuses these values")

    def _bind_target(self, tp: Any, value: dict, path: str) -> Any:
        cls = self.locate(value[TARGET], f"{path}.{TARGET}" if path else TARGET)
        if cls is BAD:
            return BAD
        allowed = [option for option in alternatives(tp) if isinstance(option, type)]
        if allowed and not any(issubclass(cls, option) for option in allowed):
            names = " or ".join(type_name(option) for option in allowed)
            message = f"{value[TARGET]!r} is a {type_name(cls)}; this key takes {names}"
            self.problems.append(Problem(f"{path}.{TARGET}", message))
            return BAD
        rest = {name: item for name, item in value.items() if name != TARGET}
        return self.construct(cls, rest, path)

    def locate(self, target: Any, path: str) -> Any:
        """Import a settings class. Only our packages and torchtitan's config classes are legal."""
        package = str(target).split(".")[0]
        if package not in (*OUR_PACKAGES, "torchtitan"):
            legal = ", ".join((*OUR_PACKAGES, "torchtitan"))
            message = f"{target!r} may not be named here; classes of these packages may: {legal}"
            self.problems.append(Problem(path, message))
            return BAD
        parts = target.split(".")
        found: Any = None
        located = False
        for split in range(len(parts), 0, -1):
            module_name = ".".join(parts[:split])
            try:
                found = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if error.name and not module_name.startswith(error.name):
                    raise
                continue
            for index, attribute in enumerate(parts[split:], split):
                if not hasattr(found, attribute):
                    owner = ".".join(parts[:index])
                    public = [name for name in dir(found) if not name.startswith("_")]
                    message = f"{target!r}: {owner} has no {attribute!r}"
                    self.problems.append(Problem(path, message, did_you_mean(attribute, public)))
                    return BAD
                found = getattr(found, attribute)
            located = True
            break
        if not located:
            self.problems.append(Problem(path, f"{target!r} cannot be imported"))
            return BAD
        if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
            message = f"{target!r} is not a settings class (a dataclass such as 'X.Config')"
            self.problems.append(Problem(path, message))
            return BAD
        return found

    def _bind_union(self, tp: Any, value: Any, path: str) -> Any:
        options = alternatives(tp)
        if value is None and type(None) in options:
            return None
        attempts = [option for option in options if option is not type(None)]
        trials = []
        for option in attempts:
            trial = Binder()
            result = trial.bind(option, value, path)
            if not trial.problems:
                return result
            trials.append(trial)
        mappings = [t for o, t in zip(attempts, trials, strict=True) if _takes_mapping(o)]
        if isinstance(value, dict) and len(mappings) == 1:
            self.problems += mappings[0].problems
        elif len(trials) == 1 and not any(option is type(None) for option in options):
            self.problems += trials[0].problems
        else:
            self._mismatch(tp, value, path)
        return BAD

    def _bind_sequence(self, tp: Any, value: Any, path: str) -> Any:
        if not isinstance(value, list | tuple):
            return self._mismatch(tp, value, path)
        args, kind = get_args(tp), get_origin(tp) or tp
        if kind is tuple and args and args[-1] is not Ellipsis:
            if len(args) != len(value):
                message = f"expected {len(args)} items, got {len(value)}: {value!r}"
                self.problems.append(Problem(path, message))
                return BAD
            items = [
                self.bind(a, v, f"{path}[{i}]")
                for i, (a, v) in enumerate(zip(args, value, strict=True))
            ]
        else:
            item = args[0] if args else Any
            items = [self.bind(item, v, f"{path}[{i}]") for i, v in enumerate(value)]
        return BAD if BAD in items else kind(items)

    def _bind_mapping(self, tp: Any, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return self._mismatch(tp, value, path)
        key_type, value_type = get_args(tp) or (Any, Any)
        bound = {
            self.bind(key_type, k, path): self.bind(value_type, v, f"{path}.{k}")
            for k, v in value.items()
        }
        return BAD if BAD in (*bound, *bound.values()) else bound

    def _bind_plain(self, tp: Any, value: Any, path: str) -> Any:
        if tp is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(tp, type):
            return value
        fits = isinstance(value, tp) and not (tp in (int, float) and isinstance(value, bool))
        return value if fits else self._mismatch(tp, value, path)

    @staticmethod
    def _is_literal(tp: Any, value: Any) -> bool:
        return any(value == option and type(value) is type(option) for option in get_args(tp))

    def _mismatch(self, tp: Any, value: Any, path: str) -> _Bad:
        hint = ""
        literals = [v for o in alternatives(tp) if get_origin(o) is Literal for v in get_args(o)]
        if literals and isinstance(value, str):
            hint = did_you_mean(value, [str(option) for option in literals])
        elif isinstance(value, bool) and not isinstance(tp, bool):
            hint = "YAML reads on, off, yes and no as true and false; quote the word to keep it"
        elif isinstance(value, str) and tp in (int, float):
            hint = "this key takes no unit suffix; write the number out, like 131072"
        message = f"expected {describe(tp)}, got {value!r}"
        self.problems.append(Problem(path, message, hint))
        return BAD

    def _unknown_key(self, name: str, path: str, siblings: list[str]) -> None:
        section = path.rpartition(".")[0]
        self.problems.append(
            UnknownKey(
                path=path,
                message="unknown key",
                hint=f"{section or 'a recipe'} takes: {', '.join(siblings)}",
                name=name,
                siblings=tuple(siblings),
            )
        )

    def _attempt(self, path: str, build: Any, prefix: str, value: Any = BAD) -> Any:
        try:
            return build()
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            text = str(error) or type(error).__name__
            if value is not BAD:
                text = f"{prefix}, got {value!r}"
            elif not text.startswith(path or "\0"):
                text = f"{prefix}: {text}"
            self.problems.append(Problem(path, text))
            return BAD


@dataclasses.dataclass(frozen=True)
class UnknownKey(Problem):
    """A key that the schema does not have; ``suggest`` names the likely ones."""

    name: str = ""
    siblings: tuple[str, ...] = ()


def _takes_mapping(tp: Any) -> bool:
    is_dataclass = isinstance(tp, type) and dataclasses.is_dataclass(tp)
    return is_dataclass or tp is dict or get_origin(tp) is dict
