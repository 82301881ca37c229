"""Rewrite a checkpoint folder in another layout, without ever holding a tensor whole.

As a command: ``python -m components.models.glm_flash.hf.convert SOURCE TARGET --layout release``.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.core.units import BYTES
from components.models.glm_flash.hf import names
from components.models.glm_flash.hf.files import (
    DTYPES,
    INDEX,
    SUFFIX,
    Stored,
    list_stored,
    storage_problems,
)
from components.models.glm_flash.hf.fold import fold
from components.models.glm_flash.hf.names import FUSED, SCALE, Leaf, parse
from components.models.glm_flash.hf.plan import Piece, Plan, plan
from components.models.glm_flash.hf.reader import summary
from components.models.glm_flash.hf.slices import Slices
from components.models.glm_flash.hf.writer import Entry, shards, write_file

CHUNK_BYTES = 64 * 2**20
"""Rows are read and written in runs of about this many bytes (counted in float32)."""

# Weights in other formats would contradict the rewritten ones.
_WEIGHTS = (SUFFIX, ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True)
class Output:
    """A tensor to be written: the pieces that follow each other in it."""

    entry: Entry
    pieces: list[Piece]


def convert(
    source: Path,
    target: Path,
    layout: str,
    max_shard: int,
    dtype: torch.dtype = torch.bfloat16,
    text_only: bool = False,
) -> str:
    """Rewrite the checkpoint in ``source`` into ``target``.

    Block-scaled tensors are dequantised. Every tensor of the text model comes out in ``dtype``,
    but those that are kept in float32, in that. Tensors of vision and multi-token prediction keep
    their names and types, or ``dtype`` where they were block-scaled. Files that are not weights are
    copied; config.json loses what it says about quantisation.

    Args:
        layout: "release" or "memory".
        max_shard: bytes of the largest file; a tensor that is larger has a file of its own.
        text_only: leave vision and multi-token prediction out.

    Returns:
        One line that counts what was read and left out.

    Raises:
        ValueError: ``source`` cannot be read or has tensors that mean nothing here, ``target`` is
            not empty, or the disk is too small.
    """
    stored = list_stored(source)
    found = plan({name: tensor.shape for name, tensor in stored.items()})
    _refuse_unreadable(source, stored, found)
    outputs = _text(found, layout, dtype)
    if not text_only:
        outputs += [_other(name, stored, dtype) for name in (*found.vision, *found.prediction)
                    if not name.endswith(SCALE)]  # fmt: skip
    # Wide types first: each tensor then begins at a multiple of its element's size.
    files = [
        sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        for entries in shards((output.entry for output in outputs), max_shard)
    ]
    _prepare(target, files)
    pieces = {output.entry.name: output.pieces for output in outputs}
    weight_map: dict[str, str] = {}
    with Slices(stored) as slices:
        for number, entries in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}{SUFFIX}"
            parts = (_read(slices, pieces[entry.name], entry.dtype) for entry in entries)
            write_file(target / name, entries, parts)
            weight_map |= {entry.name: name for entry in entries}
    _copy_others(source, target, text_only)
    # Last: its presence says that the checkpoint is complete.
    index = {"metadata": {"total_size": _size(files)}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return summary(source, found, others="left out" if text_only else "carried over")


def _refuse_unreadable(source: Path, stored: dict[str, Stored], found: Plan) -> None:
    problems = [f"{name}: unknown" for name in found.unknown] + found.problems
    problems += [f"{name}: {problem}" for name, problem in storage_problems(stored).items()]
    if not found.pieces:
        problems.append("no tensor of the text model")
    if problems:
        listed = "\n  ".join(fold(problems))
        raise ValueError(f"{source}: cannot be converted\n  {listed}")


def _text(found: Plan, layout: str, dtype: torch.dtype) -> list[Output]:
    """The text model's outputs, layer by layer."""
    groups: dict[tuple[float, str], list[str]] = {}
    for release in found.pieces:
        leaf = parse(release)
        fused = names.fused_leaf(leaf.leaf) if layout == "memory" else None
        layer = math.inf if leaf.layer is None else leaf.layer
        groups.setdefault((layer, fused or release), []).append(release)
    outputs = []
    for (layer, key), members in sorted(groups.items()):
        if key in FUSED:
            outputs.append(_fused(Leaf(int(layer), key), members, found, dtype))
        else:
            name = key if layout == "release" else names.memory_name(parse(key))
            outputs.append(_single(name, key, found.pieces[key], dtype))
    return outputs


def _single(name: str, release: str, piece: Piece, dtype: torch.dtype) -> Output:
    kept = names.stays_float32(names.native_name(release)[0])
    return Output(Entry(name, piece.shape, torch.float32 if kept else dtype), [piece])


def _fused(leaf: Leaf, members: list[str], found: Plan, dtype: torch.dtype) -> Output:
    """One tensor that holds all ``members``, in the order that ``FUSED`` gives."""
    parts = FUSED[leaf.leaf]
    stacked = "{}" in parts[0]
    count = len(members) // len(parts)
    wanted = [
        names.release_name(Leaf(leaf.layer, part), expert if stacked else None)
        for expert in range(count)
        for part in parts
    ]
    name = names.memory_name(leaf)
    shapes = {found.pieces[member].shape for member in members}
    if set(wanted) != set(members) or len(shapes) != 1:
        held = ", ".join(fold(members))
        raise ValueError(f"{name}: cannot be made of {held}; of shapes {sorted(shapes)}")
    rows, *columns = shapes.pop()
    shape = (len(parts) * rows, *columns)
    kept = names.stays_float32(names.native_name(wanted[0])[0])
    entry = Entry(name, (count, *shape) if stacked else shape, torch.float32 if kept else dtype)
    return Output(entry, [found.pieces[release] for release in wanted])


def _other(name: str, stored: dict[str, Stored], dtype: torch.dtype) -> Output:
    tensor = stored[name]
    scaled = name + SCALE in stored
    entry = Entry(name, tensor.shape, dtype if scaled else DTYPES[tensor.code])
    if len(tensor.shape) != 3:
        return Output(entry, [Piece(name, tensor.shape, scaled=scaled)])
    matrices = [Piece(name, tensor.shape[1:], i, scaled=scaled) for i in range(tensor.shape[0])]
    return Output(entry, matrices)


def _read(slices: Slices, pieces: list[Piece], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for piece in pieces:
        if not piece.shape:
            yield slices.read(piece, (), ()).to(dtype)
            continue
        rows, *columns = piece.shape
        step = max(1, CHUNK_BYTES // (4 * math.prod(columns)))
        for start in range(0, rows, step):
            lengths = (min(step, rows - start), *columns)
            yield slices.read(piece, (start, *[0] * len(columns)), lengths).to(dtype)


def _prepare(target: Path, files: list[list[Entry]]) -> None:
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target}: not empty; give a new folder, or empty this one")
    target.mkdir(parents=True, exist_ok=True)
    needed, free = _size(files), shutil.disk_usage(target).free
    if needed > free:
        raise ValueError(
            f"{target}: needs {needed / 2**30:.1f} GiB of disk, {free / 2**30:.1f} are free"
        )


def _size(files: list[list[Entry]]) -> int:
    return sum(entry.bytes for entries in files for entry in entries)


def _copy_others(source: Path, target: Path, text_only: bool) -> None:
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name == INDEX or file.suffix in _WEIGHTS:
            continue
        if file.name == "config.json":
            config = _plain_config(json.loads(file.read_text()), text_only)
            (target / file.name).write_text(json.dumps(config, indent=2) + "\n")
        else:
            shutil.copyfile(file, target / file.name)


def _plain_config(config: dict[str, Any], text_only: bool) -> dict[str, Any]:
    """A config.json for weights that are not block-scaled any more."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if text_only and "num_nextn_predict_layers" in plain:
        plain["num_nextn_predict_layers"] = 0
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = _plain_config(plain["text_config"], text_only)
    return plain


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m components.models.glm_flash.hf.convert",
        description="Rewrite a GLM-5.3-Flash checkpoint folder, quantised or not, in bfloat16.",
    )
    parser.add_argument("source", type=Path, help="folder with safetensors files, any layout")
    parser.add_argument("target", type=Path, help="new folder")
    parser.add_argument(
        "--layout",
        choices=["release", "memory"],
        required=True,
        help="release: one tensor per expert, as published; memory: stacked, as in transformers",
    )
    parser.add_argument("--max-shard", default="5GB", help="largest file, like 5GB or 512MiB")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default: bfloat16"
    )
    parser.add_argument(
        "--text-only", action="store_true", help="leave out vision and multi-token prediction"
    )
    given = parser.parse_args(arguments)
    try:
        limit = BYTES.parse(given.max_shard)
        dtype = getattr(torch, given.dtype)
        line = convert(given.source, given.target, given.layout, limit, dtype, given.text_only)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.target}: written; from {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
