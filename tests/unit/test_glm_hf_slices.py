"""Parts of stored tensors are read exactly, with few files open."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from components.models.glm_flash.hf import slices
from components.models.glm_flash.hf.files import list_stored
from components.models.glm_flash.hf.plan import Piece
from components.models.glm_flash.hf.slices import Slices


def test_a_box_of_one_expert_of_a_block_scaled_stack(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 300, 270).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, 3)
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "a.safetensors")
    factors = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :300, :270]
    whole = values.float() * factors
    # The second half of the rows of the second expert, from its row 20 and column 125 on.
    piece = Piece("w", (150, 270), expert=1, row=150, scaled=True)
    with Slices(list_stored(tmp_path)) as opened:
        box = opened.read(piece, (20, 125), (100, 140))
    assert torch.equal(box, whole[1, 170:270, 125:265])


def test_no_more_files_are_open_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(5):
        save_file({f"t{index}": torch.full((2,), index)}, tmp_path / f"{index}.safetensors")
    now, most, count = 0, 0, 0

    @contextlib.contextmanager
    def counted(path: Path, framework: str) -> Iterator[Any]:
        nonlocal now, most, count
        now, count = now + 1, count + 1
        most = max(most, now)
        with safe_open(path, framework=framework) as opened:
            yield opened
        now -= 1

    monkeypatch.setattr(slices, "safe_open", counted)
    with Slices(list_stored(tmp_path), limit=2) as opened:
        for index in (0, 1, 0, 1, 2, 3, 4):
            assert opened.read(Piece(f"t{index}", (2,)), (0,), (2,)).tolist() == [index, index]
    assert (now, most, count) == (0, 2, 5)
