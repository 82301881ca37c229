"""Which form of each kernel runs, per GPU architecture and shape: ``tuned.json``."""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels.sparse_mla.shape import Shape
from kernels.sparse_mla.walk import Walk

PATH = Path(__file__).with_name("tuned.json")
VARIANTS = {"forward": ("split", "simple"), "backward": ("split", "simple")}


@functools.cache
def table() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """What the file holds: by architecture, direction and variant the options of a ``build``, and
    as "preferred" the variant for shapes that several take."""
    return json.loads(PATH.read_text())


@contextmanager
def trying(direction: str, variant: str, options: dict[str, Any]) -> Iterator[None]:
    """Inside, ``choice`` gives these options for the variant."""
    listed = table()["sm_90a"][direction]
    before, listed[variant] = listed[variant], options
    try:
        yield
    finally:
        listed[variant] = before


def choice(direction: str, shape: Shape, variant: str | None = None) -> tuple[str, dict[str, Any]]:
    """The variant and the options of its ``build``.

    Args:
        direction: ``forward`` or ``backward``.
        shape: what it is for.
        variant: take this one instead of the first that takes the shape.

    Raises:
        ValueError: the variant is unknown or does not take the shape.
    """
    if variant not in (None, *VARIANTS[direction]):
        raise ValueError(
            f"sparse_mla: variant={variant!r} of the {direction}, legal are {VARIANTS[direction]}"
        )
    if variant == "split" and shape.tail:
        raise ValueError(f"sparse_mla: tail={shape.tail}, the split {direction} takes 0 only")
    listed = table()["sm_90a"][direction]
    if variant is None:
        variant = "simple" if shape.tail else listed["preferred"]["variant"]
    return variant, dict(listed[variant])


def walk_of(tokens: int) -> Walk:
    """How the split backward walks through the tiles of a latent of so many tokens."""
    listed = table()["sm_90a"]["backward"]["walk"]
    if tokens < listed["from_tokens"]:
        return Walk()
    return Walk(in_phase=listed["in_phase"], range_tokens=listed["range_tokens"])
