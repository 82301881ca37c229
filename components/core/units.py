"""Units people write in YAML and on the command line: ``128k``, ``1M``, ``90GiB``.

A field opts in by annotating its type: ``seq_len: Annotated[int, TOKENS]``. The binder then accepts
the plain integer as well as the spelled-out string; every other integer field refuses strings.
"""

import re
from dataclasses import dataclass
from typing import Annotated

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


@dataclass(frozen=True)
class Unit:
    """A family of suffixes with one meaning each.

    Attributes:
        name: what the quantity is, used in messages ("tokens", "bytes").
        factors: suffix (lower case) -> multiplier to the base unit.
        examples: what to show a user whose value was refused.
    """

    name: str
    factors: tuple[tuple[str, int], ...]
    examples: str

    def parse(self, value: object) -> int:
        """Convert ``value`` to the base unit.

        Raises:
            ValueError: not a whole number of base units, or an unknown suffix.
        """
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(self._refusal(value))
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            number, factor = value, 1
        else:
            match = _NUMBER.match(value)
            suffix = match.group(2).lower() if match else ""
            factors = {"": 1, **dict(self.factors)}
            if match is None or suffix not in factors:
                raise ValueError(self._refusal(value))
            number, factor = float(match.group(1).replace("_", "")), factors[suffix]
        result = number * factor
        if result != int(result):
            raise ValueError(f"{value!r} is not a whole number of {self.name}")
        return int(result)

    def _refusal(self, value: object) -> str:
        return f"{value!r} is not a number of {self.name}; write it like {self.examples}"


_BINARY = (("k", 2**10), ("m", 2**20))
_DECIMAL = (("k", 10**3), ("m", 10**6), ("b", 10**9))
_BYTES = tuple(
    (suffix, base**power)
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in ((f"{letter}ib", 2**10), (f"{letter}b", 10**3))
)

TOKENS = Unit("tokens", _BINARY, "131072, 128k (131,072) or 1M (1,048,576)")
"""Context lengths: ``k`` and ``M`` are binary, as in "128K context" = 131,072 tokens."""

COUNT = Unit("items", _DECIMAL, "10000, 10k (10,000) or 1.5M")
"""Steps and samples: ``k`` and ``M`` are decimal."""

BYTES = Unit("bytes", (("", 1), ("b", 1), *_BYTES), "90GiB, 512MiB or 80GB")
"""Memory and disk: ``GiB`` is 2^30, ``GB`` is 10^9."""

Tokens = Annotated[int, TOKENS]
Count = Annotated[int, COUNT]
Bytes = Annotated[int, BYTES]
