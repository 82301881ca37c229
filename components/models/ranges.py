"""Checks that several models make of their numbers."""

from collections.abc import Iterable, Iterator

from components.core.problems import nearest_multiples
from components.models.settings import Finding, ModelSettings

# torch's grouped matrix multiplication wants rows of a multiple of 16 bytes: 8 bf16 numbers.
_GROUPED_MM_ROW = 8


def below(model: ModelSettings, names: Iterable[str], least: int) -> Iterator[Finding]:
    """Fields that are less than ``least``; None is no number."""
    for name in names:
        value = getattr(model, name)
        if value is not None and not value >= least:
            yield f"model.{name}", f"{value} is too small; legal: {least} or more"


def not_positive(model: ModelSettings, names: Iterable[str]) -> Iterator[Finding]:
    """Fields that are zero, negative or no number."""
    for name in names:
        value = getattr(model, name)
        if not value > 0:
            yield f"model.{name}", f"{value} is not positive; legal: above 0"


def uneven_expert_widths(model: ModelSettings, names: Iterable[str]) -> Iterator[Finding]:
    """Widths that the experts' grouped matrix multiplication does not take."""
    for name in names:
        width = getattr(model, name)
        if width % _GROUPED_MM_ROW:
            yield (
                f"model.{name}",
                f"{width} does not suit the experts' grouped matrix multiplication; legal: a "
                f"multiple of {_GROUPED_MM_ROW}, such as "
                f"{nearest_multiples(width, _GROUPED_MM_ROW)}",
            )
