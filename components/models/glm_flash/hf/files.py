"""What is in a checkpoint folder, read off the headers of its safetensors files."""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from components.models.glm_flash.hf.fp8 import scale_shape
from components.models.glm_flash.hf.names import SCALE
from components.models.glm_flash.hf.plan import Shape

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Every stored type that is read here."""

HEADER_LENGTH = struct.Struct("<Q")
"""The first bytes of a file: the length of its header, which is JSON."""

# What torch's distributed checkpoints note in files that hold parts of tensors.
_PARTS = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        code: its type, as safetensors spells it; a ``DTYPES`` key or another.
        offset: of its first byte after the file's header.
    """

    file: Path
    shape: Shape
    code: str
    offset: int


def list_stored(folder: Path) -> dict[str, Stored]:
    """List the tensors of a checkpoint folder, with an index or without.

    Raises:
        ValueError: no weights, a file that the index names is missing, a file is damaged or holds
            parts of tensors, or a name is used twice.
    """
    stored: dict[str, Stored] = {}
    for file in _weight_files(folder):
        for name, tensor in _read_header(file).items():
            other = stored.setdefault(name, tensor)
            if other is not tensor:
                raise ValueError(f"{folder}: {name} is in {other.file.name} and in {file.name}")
    return stored


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(named)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{folder}: {INDEX} names files that are missing: {missing}")
    else:
        files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(f"{folder}: no weights; expected {INDEX} or files *{SUFFIX}")
    return files


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as stream:
            size = HEADER_LENGTH.unpack(stream.read(HEADER_LENGTH.size))[0]
            # Before reading: the length of a damaged file may be anything.
            if size > os.path.getsize(file):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(size))
    except (struct.error, ValueError) as error:
        raise ValueError(f"{file}: no safetensors file, or a damaged one ({error})") from error
    if _PARTS in header.pop("__metadata__", {}):
        raise ValueError(f"{file}: holds parts of tensors; use the folder above, with whole ones")
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    expected, found = HEADER_LENGTH.size + size + end, os.path.getsize(file)
    if expected != found:
        raise ValueError(f"{file}: {found} bytes, but its header tells of {expected}; copy it anew")
    return {
        name: Stored(file, tuple(entry["shape"]), entry["dtype"], entry["data_offsets"][0])
        for name, entry in header.items()
    }


def storage_problems(stored: dict[str, Stored]) -> dict[str, str]:
    """Say, by name, which tensors cannot be read: their type or their scales make no sense."""
    problems = {}
    for name, tensor in stored.items():
        scales = stored.get(name + SCALE)
        quantized = tensor.code == "F8_E4M3"
        if tensor.code not in DTYPES:
            problems[name] = f"type {tensor.code}, expected one of {list(DTYPES)}"
        elif quantized and scales is None:
            problems[name] = f"F8_E4M3 without its scales {name}{SCALE}"
        elif scales is not None and not quantized:
            problems[name] = f"type {tensor.code}, expected F8_E4M3 beside {name}{SCALE}"
        elif scales is not None and len(tensor.shape) not in (2, 3):
            problems[name] = f"block-scaled, but of shape {list(tensor.shape)}"
        elif scales is not None and scales.shape != scale_shape(tensor.shape):
            wanted = list(scale_shape(tensor.shape))
            problems[name + SCALE] = f"found {list(scales.shape)}, expected {wanted}"
    return problems
