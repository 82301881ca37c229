"""Units people write in YAML and on the command line: ``128k``, ``1M``, ``90GiB``.

A field opts in through its type: ``max_seq_len: Tokens``. The binder then accepts the plain integer
as well as the spelled-out string; every other integer field refuses strings.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class Unit:
    """A family of suffixes with one meaning each. Quantities are whole and not negative.

    Attributes:
        what: what a value is, in messages ("a number of tokens").
        factors: suffix (lower case) -> multiplier to the base unit.
        examples: what to show a user whose value was refused.
    """

    what: str
    factors: tuple[tuple[str, int], ...]
    examples: str

    def parse(self, value: object) -> int:
        """Convert ``value`` to the base unit.

        Raises:
            ValueError: not a whole number of base units, negative, or an unknown suffix.
        """
        number = self._number(value)
        if number is None or number < 0 or number.denominator != 1:
            raise ValueError(f"{value!r} is not {self.what} such as {self.examples}")
        return int(number)

    def _number(self, value: object) -> Fraction | None:
        if isinstance(value, str):
            match = _NUMBER.fullmatch(value)
            factor = {"": 1, **dict(self.factors)}.get(match[2].lower()) if match else None
            return Fraction(match[1].replace("_", "")) * factor if match and factor else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return Fraction(value) if abs(value) < float("inf") else None


_BINARY = (("k", 2**10), ("m", 2**20))
_DECIMAL = (("k", 10**3), ("m", 10**6), ("b", 10**9))
_BYTES = tuple(
    (suffix, base**power)
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in ((f"{letter}ib", 2**10), (f"{letter}b", 10**3))
)

TOKENS = Unit("a number of tokens", _BINARY, "131072, 128k (131,072) or 1M (1,048,576)")
"""Context lengths: ``k`` and ``M`` are binary, as in "128K context" = 131,072 tokens."""

COUNT = Unit("a whole number", _DECIMAL, "10000, 10k (10,000) or 1.5M")
"""Steps and samples: ``k`` and ``M`` are decimal."""

BYTES = Unit("a number of bytes", (("b", 1), *_BYTES), "90GiB, 512MiB or 80GB")
"""Memory and disk: ``GiB`` is 2^30, ``GB`` is 10^9."""

Tokens = Annotated[int, TOKENS]
Count = Annotated[int, COUNT]
Bytes = Annotated[int, BYTES]
