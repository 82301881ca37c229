"""Host memory that techniques pin for good, in one account per process."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

GIB = 2**30


class HostBudgetError(ValueError):
    """More host memory was asked for than this process may have."""


@dataclass(frozen=True)
class Holding:
    """What one owner holds.

    Attributes:
        payload: bytes that it stores.
        pinned: bytes that it takes from the system, rounding included.
    """

    payload: int
    pinned: int


class HostAccountant:
    """Who has reserved how much host memory, and how much there may be.

    Nothing is allocated here. A limit of None allows everything: nobody has measured yet.
    """

    def __init__(self, limit: int | None = None) -> None:
        """
        Args:
            limit: bytes that this process may pin in all; None for no limit.
        """
        self.limit = limit
        self._holdings: dict[str, Holding] = {}

    @property
    def payload(self) -> int:
        """Bytes stored by all owners."""
        return sum(holding.payload for holding in self._holdings.values())

    @property
    def pinned(self) -> int:
        """Bytes taken from the system by all owners."""
        return sum(holding.pinned for holding in self._holdings.values())

    @property
    def holdings(self) -> Mapping[str, Holding]:
        """Owner -> what it holds."""
        return dict(self._holdings)

    def reserve(self, owner: str, payload: int, pinned: int | None = None) -> None:
        """Set bytes aside for an owner that holds none yet.

        Args:
            owner: dotted key of what needs them, such as "components.<name>".
            payload: bytes that it will store.
            pinned: bytes that it will take, rounding included; ``payload`` by default.

        Raises:
            HostBudgetError: that would exceed the limit; nothing is reserved.
            ValueError: the owner holds something already.
        """
        if owner in self._holdings:
            raise ValueError(f"{owner} holds host memory already; release it first")
        holding = Holding(payload, payload if pinned is None else pinned)
        if self.limit is not None and self.pinned + holding.pinned > self.limit:
            raise HostBudgetError(
                f"{owner}: {gib(holding.pinned)} of pinned host memory do not fit: this process "
                f"may have {gib(self.limit)}{self._taken()}"
            )
        self._holdings[owner] = holding

    def release(self, owner: str) -> None:
        """Give back what an owner holds; nothing happens if that is nothing."""
        self._holdings.pop(owner, None)

    def _taken(self) -> str:
        taken = ", ".join(f"{owner} {gib(h.pinned)}" for owner, h in self._holdings.items())
        return f", of which {taken} are taken" if taken else ""


@cache
def host_accountant() -> HostAccountant:
    """The account of this process."""
    return HostAccountant()


def gib(nbytes: int) -> str:
    """Bytes for people, such as "1.50 GiB"."""
    return f"{nbytes / GIB:.2f} GiB"
