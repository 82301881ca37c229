"""What is wrong with a recipe, in words a user can act on."""

import difflib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing to fix in a recipe.

    Attributes:
        path: dotted key ("training.steps"), or "" when no single key is at fault.
        message: what is wrong, naming the value, and what would be legal.
        hint: one concrete way out ("did you mean ...", a command), or ""; may have several lines.
        where: "file:line" when known.
    """

    path: str
    message: str
    hint: str = ""
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.path}: {self.message}" if self.path else self.message
        lines = [f"{head} ({self.where})" if self.where else head]
        lines += [f"    {line}" for line in self.hint.splitlines()]
        return "\n".join(lines)


class RecipeError(ValueError):
    """A recipe that cannot run. Carries every problem found, not only the first.

    Args:
        problems: at least one.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def shown(value: Any, longest: int = 60) -> str:
    """A value the way a recipe writes it: ``null``, ``true``, ``'text'``, ``[1, 2]``, ``{a: 1}``.

    Args:
        value: plain data.
        longest: characters after which the rest is left out.
    """
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(shown(item) for item in value)}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: {shown(item)}' for key, item in value.items())}}}"
    else:
        text = repr(value) if isinstance(value, str | int | float) else str(value)
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def listing(title: str, names: Iterable[str]) -> str:
    """``title: a, b, c`` broken into lines that fit under a problem."""
    return textwrap.fill(
        f"{title}: {', '.join(names)}", 92, subsequent_indent="  ", break_on_hyphens=False
    )


def nearest(name: str, options: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """Legal names close to a mistyped one, best first."""
    unique = list(dict.fromkeys(options))
    lowered = {option.lower(): option for option in unique}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=limit, cutoff=cutoff)
    return [lowered[match] for match in found]


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """``did you mean X?`` with up to three candidates, or an empty string."""
    found = nearest(name, options)
    return f"did you mean {' or '.join(found)}?" if found else ""


def divisors(number: int) -> list[int]:
    """The positive divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def listed_divisors(number: int) -> str:
    """The same for people, as "1, 2, 4"."""
    return ", ".join(map(str, divisors(number)))


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of ``unit`` around ``value``, as "1024 or 1536"."""
    down, up = value // unit * unit, max(unit, -(-value // unit) * unit)
    return f"{down} or {up}" if down > 0 else str(up)
