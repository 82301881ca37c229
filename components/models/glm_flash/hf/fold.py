"""Say many tensor names in few lines."""

import itertools
import math
import re
from collections.abc import Iterable

_NUMBERS = re.compile(r"(layers|experts)\.(\d+)\.")
# One set of numbers per place: stands for every combination of them.
_Box = list[set[int]]


def fold(lines: Iterable[str]) -> list[str]:
    """Write lines that differ only in layer and expert numbers as one, losing none of them.

    ``layers.{1-3}.mlp.gate.weight  (3 tensors)`` stands for the lines of layers 1, 2 and 3.
    """
    points: dict[str, set[tuple[int, ...]]] = {}
    for line in lines:
        numbers = tuple(int(number) for _, number in _NUMBERS.findall(line))
        form = _NUMBERS.sub(r"\1.{}.", line.replace("{", "{{").replace("}", "}}"))
        points.setdefault(form, set()).add(numbers)
    return [_write(form, box) for form, group in points.items() for box in _boxes(group)]


def _boxes(points: set[tuple[int, ...]]) -> list[_Box]:
    """Cut a set of points into boxes."""
    if points == {()}:
        return [[]]
    tails: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in points:
        tails.setdefault(first, set()).add(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], set[int]] = {}
    for first, rests in tails.items():
        alike.setdefault(frozenset(rests), set()).add(first)
    return [[firsts, *box] for rests, firsts in alike.items() for box in _boxes(set(rests))]


def _write(form: str, box: _Box) -> str:
    count = math.prod(len(axis) for axis in box)
    line = form.format(*(_ranges(axis) for axis in box))
    return line if count == 1 else f"{line}  ({count} tensors)"


def _ranges(numbers: set[int]) -> str:
    """``3``, or ``{0-7,9}``."""
    if len(numbers) == 1:
        return str(*numbers)
    spans = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [str(number) for _, number in run]
        spans.append(members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return "{" + ",".join(spans) + "}"
