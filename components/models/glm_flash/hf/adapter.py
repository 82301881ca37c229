"""Between the model's tensors and the published files' tensors, for torchtitan's checkpoints."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from components.models.glm_flash.hf import names
from components.models.glm_flash.hf.config import hf_config
from components.models.glm_flash.hf.plan import Piece, Shape, plan
from components.models.glm_flash.hf.reader import CheckpointReader
from components.models.glm_flash.hf.stacked import join_experts, split_experts
from components.titan.export import ExportRules

if TYPE_CHECKING:
    from components.models.glm_flash.settings import GlmFlashModel

FILE_BYTES = 5 * 10**9
"""An export's files are about this large, or larger where there would be too many."""

# torch merges the ranks' files with this many threads, each of which opens all of them at once;
# ranks may rarely open more than 1,024.
_MERGE_THREADS = 5
_OPEN_FILES = 512


class ReleaseStates(dict[str, torch.Tensor]):
    """Release names -> views into native tensors, which it remembers.

    Whoever loads into the views has loaded the native tensors.
    """

    def __init__(self, native: dict[str, torch.Tensor], views: dict[str, torch.Tensor]) -> None:
        super().__init__(views)
        self.native = native
        self._views = views

    @property
    def intact(self) -> bool:
        """Whether every entry still is the view that was put in."""
        same = (self.get(name) is view for name, view in self._views.items())
        return len(self) == len(self._views) and all(same)


class GlmFlashStateDictAdapter(StateDictAdapter, ExportRules):
    """Import from any layout, export to the release's.

    Args:
        model_config: torchtitan's configuration of the model.
        hf_assets_path: folder with the tokenizer; ``checkpoint.initial_load_in_hf`` without a path
            looks for weights there.
        settings: the recipe's model, written to an export's config.json.
    """

    def __init__(
        self,
        model_config: BaseModel.Config,
        hf_assets_path: str | None,
        *,
        settings: "GlmFlashModel",
    ) -> None:
        # The base class would lay out exports like the weights in the assets folder, if any.
        super().__init__(model_config, None)
        self.hf_assets_path = hf_assets_path
        self._settings = settings
        self._expected: dict[str, Shape] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> ReleaseStates:
        """Name the model's tensors as the release does, without copying any.

        Stacked experts come out one by one, on each rank those that it holds.

        Raises:
            ValueError: a tensor has no name in the release.
        """
        views: dict[str, torch.Tensor] = {}
        sizes: dict[str, int] = {}
        self._expected = {}
        for native, tensor in state_dict.items():
            try:
                leaf = names.from_native(native)
            except KeyError as error:
                raise ValueError(f"{native}: the published model has no such tensor") from error
            if names.is_stacked(native):
                for index, matrix in split_experts(tensor):
                    views[names.release_name(leaf, index)] = matrix
                for index in range(tensor.shape[0]):
                    self._expect(names.release_name(leaf, index), tensor, tensor.shape[1:], sizes)
            else:
                views[names.release_name(leaf)] = tensor
                self._expect(names.release_name(leaf), tensor, tensor.shape, sizes)
        self.fqn_to_index_mapping = assign_files(sizes, _world_size())
        return ReleaseStates(state_dict, views)

    def _expect(
        self, release: str, tensor: torch.Tensor, shape: Shape, sizes: dict[str, int]
    ) -> None:
        self._expected[release] = tuple(shape)
        sizes[release] = math.prod(shape) * tensor.element_size()

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give back the native tensors behind ``to_hf``'s result; otherwise rename and stack.

        Args:
            hf_state_dict: from ``to_hf``, or whole tensors under the names of any layout, of which
                those of vision and multi-token prediction are left out.

        Raises:
            ValueError: a name is unknown or given twice, an expert is missing, or a tensor is
                block-scaled.
        """
        if isinstance(hf_state_dict, ReleaseStates) and hf_state_dict.intact:
            return hf_state_dict.native
        found = plan({name: tuple(tensor.shape) for name, tensor in hf_state_dict.items()})
        problems = [
            *(f"{name}: unknown" for name in found.unknown),
            *(f"{piece.source}: block-scaled" for piece in found.pieces.values() if piece.scaled),
            *found.problems,
        ]
        if problems:
            raise ValueError("cannot convert these tensors\n  " + "\n  ".join(problems))
        return _assemble({name: _take(hf_state_dict, p) for name, p in found.pieces.items()})

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        """Open a checkpoint for the tensors last given to ``to_hf``; see ``CheckpointReader``."""
        return CheckpointReader(path, self._expected, from_quantized)

    def stays_float32(self, name: str) -> bool:
        """See ``ExportRules``."""
        return names.stays_float32(name)

    def export_files(self, state_dict: Mapping[str, Any]) -> dict[str, str]:
        """See ``ExportRules``: the config.json that transformers wants beside the weights."""
        dtype = str(state_dict["tok_embeddings.weight"].dtype).removeprefix("torch.")
        return {"config.json": json.dumps(hf_config(self._settings, dtype), indent=2) + "\n"}


def _take(tensors: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    tensor = tensors[piece.source]
    matrix = tensor if piece.expert is None else tensor[piece.expert]
    return matrix[piece.row : piece.row + piece.shape[0]] if piece.shape else matrix


def _assemble(release: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    native: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in release.items():
        home, expert = names.native_name(name)
        if expert is None:
            native[home] = tensor
        else:
            stacks.setdefault(home, {})[expert] = tensor
    return native | {name: join_experts(name, matrices) for name, matrices in stacks.items()}


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def assign_files(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Number the files, from 1, that an export's tensors go to, in order and about equally full.

    Args:
        sizes: tensor name -> bytes.
        world_size: ranks that export together. torch writes one file per rank and number and then
            opens them all at once, so many ranks mean fewer and larger files.
    """
    total = sum(sizes.values())
    count = max(1, math.ceil(total / FILE_BYTES))
    while count > 1 and _files_open(count, world_size) > _OPEN_FILES:
        count -= 1
    numbers, before = {}, 0
    for name, size in sizes.items():
        numbers[name] = 1 + before * count // max(total, 1)
        before += size
    return numbers


def _files_open(count: int, world_size: int) -> int:
    return count * world_size * min(_MERGE_THREADS, math.ceil(count / world_size))
