"""Read parts of a checkpoint's tensors."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from components.models.glm_flash.hf.files import Stored
from components.models.glm_flash.hf.fp8 import dequantize
from components.models.glm_flash.hf.names import SCALE
from components.models.glm_flash.hf.plan import Piece, Shape


class Slices:
    """Read parts of pieces; nothing else of a file comes into memory.

    Use as a context manager: files stay open until it ends, at most ``limit`` at a time.
    """

    def __init__(self, stored: dict[str, Stored], limit: int = 8) -> None:
        self._stored = stored
        self._limit = limit
        self._open: dict[Path, tuple[Any, contextlib.ExitStack]] = {}

    def __enter__(self) -> "Slices":
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            self._close_oldest()

    def read(self, piece: Piece, offsets: Shape, lengths: Shape) -> torch.Tensor:
        """Read a box of a piece, in its stored type, or in float32 if it is block-scaled."""
        values = self._slice(piece.source, piece.expert, piece.row, offsets, lengths)
        if not piece.scaled:
            return values
        shape = self._stored[piece.source + SCALE].shape
        whole = shape if piece.expert is None else shape[1:]
        scales = self._slice(piece.source + SCALE, piece.expert, 0, (0,) * len(whole), whole)
        return dequantize(values, scales, piece.row + offsets[0], offsets[1])

    def _slice(
        self, name: str, expert: int | None, row: int, offsets: Shape, lengths: Shape
    ) -> torch.Tensor:
        starts = (row + offsets[0], *offsets[1:]) if offsets else ()
        box = [slice(start, start + size) for start, size in zip(starts, lengths, strict=True)]
        where = box if expert is None else [slice(expert, expert + 1), *box]
        found = self._file(self._stored[name].file).get_slice(name)[tuple(where)]
        return found if expert is None else found.squeeze(0)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            if len(self._open) == self._limit:
                self._close_oldest()
            stack = contextlib.ExitStack()
            self._open[path] = (stack.enter_context(safe_open(path, framework="pt")), stack)
        return self._open[path][0]

    def _close_oldest(self) -> None:
        path = next(iter(self._open))
        self._open.pop(path)[1].close()
