"""Where each tensor of the text model lies in a checkpoint, whatever the checkpoint's layout."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from components.models.glm_flash.hf.fold import fold
from components.models.glm_flash.hf.names import FUSED, SCALE, Leaf, parse, release_name

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One release tensor as a part of a stored one.

    Attributes:
        source: name of the stored tensor.
        shape: shape of the release tensor.
        expert: index on the stored tensor's leading dimension; None if it has no such dimension.
        row: first row of the piece, after ``expert`` is taken. Pieces span all columns.
        scaled: the stored tensor is block-scaled; its scales are called ``source + SCALE``.
    """

    source: str
    shape: Shape
    expert: int | None = None
    row: int = 0
    scaled: bool = False


@dataclass
class Plan:
    """What a checkpoint holds.

    Attributes:
        pieces: release name -> piece, for everything that belongs to the text model.
        vision: names of tensors of the vision tower.
        prediction: names of tensors of multi-token prediction layers.
        unknown: names that mean nothing here.
        problems: "name: what is wrong", for names that mean something but cannot be used.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    vision: list[str] = field(default_factory=list)
    prediction: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plan(shapes: Mapping[str, Shape]) -> Plan:
    """Sort stored tensors into the text model's and the others'.

    The layout is read off each name, so files may mix layouts.

    Args:
        shapes: stored name -> shape.
    """
    result = Plan()
    leaves = {name: parse(name.removesuffix(SCALE)) for name in shapes}
    predicting = _prediction_layers(leaves.values())
    for name, leaf in leaves.items():
        if leaf.is_vision:
            result.vision.append(name)
        elif leaf.layer in predicting:
            result.prediction.append(name)
        elif not leaf.is_text:
            result.unknown.append(name)
        elif name.endswith(SCALE):
            if name.removesuffix(SCALE) not in shapes:
                result.problems.append(f"{name}: scales of a tensor that is not there")
        else:
            _add(result, name, leaf, shapes)
    return result


def _prediction_layers(leaves: Iterable[Leaf]) -> set[int]:
    """Layers that are there for multi-token prediction: they follow all the others."""
    layers: dict[int, bool] = {}
    for leaf in leaves:
        if leaf.layer is not None:
            layers[leaf.layer] = layers.get(leaf.layer, False) or leaf.is_prediction
    last = max((layer for layer, marked in layers.items() if not marked), default=-1)
    return {layer for layer in layers if layer > last}


def _add(result: Plan, name: str, leaf: Leaf, shapes: Mapping[str, Shape]) -> None:
    parts = FUSED.get(leaf.leaf)
    shape = tuple(shapes[name])
    scaled = name + SCALE in shapes
    if parts is None:
        pieces = [(release_name(leaf), Piece(name, shape, scaled=scaled))]
    else:
        stacked = "{}" in parts[0]
        if len(shape) != 3 or shape[1 if stacked else 0] % len(parts):
            held = f"{len(parts)} tensors" + (" per expert" if stacked else "")
            result.problems.append(f"{name}: shape {list(shape)} cannot hold {held}")
            return
        pieces = list(_split(name, leaf, shape, scaled))
    for release, piece in pieces:
        other = result.pieces.setdefault(release, piece)
        if other is not piece:
            result.problems.append(f"{name}: {release} is given by {other.source} too")


def _split(name: str, leaf: Leaf, shape: Shape, scaled: bool) -> Iterable[tuple[str, Piece]]:
    parts = FUSED[leaf.leaf]
    stacked = "{}" in parts[0]
    experts = range(shape[0]) if stacked else [None]
    whole = shape[1:] if stacked else shape
    rows = whole[0] // len(parts)
    for expert, (index, part) in itertools.product(experts, enumerate(parts)):
        release = release_name(Leaf(leaf.layer, part), expert)
        yield release, Piece(name, (rows, *whole[1:]), expert, index * rows, scaled)


def misfits(found: Plan, expected: Mapping[str, Shape]) -> str | None:
    """Compare a checkpoint with what a model needs.

    Args:
        expected: release name -> shape.

    Returns:
        One message that names every tensor that does not fit, or None.
    """
    unknown = list(found.unknown)
    wrong = list(found.problems)
    for name, piece in found.pieces.items():
        if name not in expected:
            unknown.append(name if piece.expert is None else f"{name} (in {piece.source})")
        elif tuple(expected[name]) != piece.shape:
            where = "" if piece.source == name else f" (in {piece.source})"
            shapes = f"found {list(piece.shape)}, expected {list(expected[name])}"
            wrong.append(f"{name}{where}: {shapes}")
    sections = [
        ("unknown", unknown),
        ("missing", [name for name in expected if name not in found.pieces]),
        ("of the wrong shape, or unusable", wrong),
    ]
    lines = [
        line
        for title, entries in sections
        if entries
        for line in (f"{title} ({len(entries)}):", *(f"  {line}" for line in fold(entries)))
    ]
    return "\n".join(lines) or None
