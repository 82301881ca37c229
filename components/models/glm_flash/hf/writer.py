"""Write safetensors files without holding their tensors."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.models.glm_flash.hf.files import DTYPES, HEADER_LENGTH
from components.models.glm_flash.hf.plan import Shape

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its parts follow each other in memory order."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_file(path: Path, entries: list[Entry], parts: Iterable[Iterable[torch.Tensor]]) -> None:
    """Write a safetensors file, holding one part at a time.

    Args:
        path: appears when the file is complete.
        entries: the file's tensors.
        parts: for each entry, tensors of its type whose elements, one after the other, are it.

    Raises:
        ValueError: parts are more or fewer than their entry holds.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(_header(entries))
        for entry, tensors in zip(entries, parts, strict=True):
            written = sum(stream.write(_memory(tensor, entry)) for tensor in tensors)
            if written != entry.bytes:
                raise ValueError(
                    f"{entry.name}: {written} bytes came, {entry.bytes} were announced"
                )
    os.replace(partial, path)


def _header(entries: list[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        span = [offset, offset + entry.bytes]
        code = _CODES[entry.dtype]
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors are mapped into memory: their bytes must begin where wide loads may.
    text += b" " * (-len(text) % HEADER_LENGTH.size)
    return HEADER_LENGTH.pack(len(text)) + text


def _memory(tensor: torch.Tensor, entry: Entry) -> memoryview:
    if tensor.dtype != entry.dtype:
        raise ValueError(f"{entry.name}: a part is {tensor.dtype}, announced was {entry.dtype}")
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def shards(entries: Iterable[Entry], limit: int) -> Iterator[list[Entry]]:
    """Cut entries, in order, into runs of at most ``limit`` bytes; a larger entry is alone."""
    current: list[Entry] = []
    size = 0
    for entry in entries:
        if current and size + entry.bytes > limit:
            yield current
            current, size = [], 0
        current.append(entry)
        size += entry.bytes
    if current:
        yield current
