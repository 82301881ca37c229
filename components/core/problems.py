"""What is wrong with a recipe, in words a user can act on."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing to fix in a recipe.

    Attributes:
        path: dotted key ("training.steps"), or "" when no single key is at fault.
        message: what is wrong, naming the value, and what would be legal.
        hint: one concrete way out ("did you mean ...", a command), or "".
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
