"""Load a published checkpoint through torch's distributed checkpoints, slice by slice."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from components.models.glm_flash.hf.files import DTYPES, list_stored, storage_problems
from components.models.glm_flash.hf.plan import Plan, Shape, misfits, plan
from components.models.glm_flash.hf.slices import Slices
from components.titan.story import narrate


class CheckpointReader(HuggingFaceStorageReader):
    """Presents release names, whatever the layout, the prefix and the types of the files.

    Each rank reads only the slices that it holds, and holds one of them at a time. Block-scaled
    tensors come out in float32; the target's type decides what they end up in.

    Args:
        path: folder with the checkpoint.
        expected: release name -> whole shape, of every tensor that the model needs.
        from_quantized: the user says that tensors are block-scaled
            (``checkpoint.initial_load_in_hf_quantized``). Such tensors are recognised without it;
            with it, a checkpoint that has none is refused.

    Raises:
        ValueError: the folder's files cannot be read, or its tensors are not the model's; all
            tensors that are unknown, missing or of another shape are named.
    """

    def __init__(self, path: str, expected: Mapping[str, Shape], from_quantized: bool) -> None:
        super().__init__(path)
        self._stored = list_stored(Path(path))
        self._found = plan({name: tensor.shape for name, tensor in self._stored.items()})
        self._names = list(expected)
        others = {*self._found.vision, *self._found.prediction}
        self._found.problems += [
            f"{name}: {problem}"
            for name, problem in storage_problems(self._stored).items()
            if name not in others
        ]
        # Here and not while loading: there, torch wraps one report per rank around the message.
        problem = misfits(self._found, expected)
        if problem is not None:
            raise ValueError(
                f"checkpoint: {path} does not hold the tensors of this model\n{problem}\n"
                "to load it, give model its sizes (they are in its config.json); to load another "
                "checkpoint, change checkpoint.initial_load_path"
            )
        scaled = sum(piece.scaled for piece in self._found.pieces.values())
        if from_quantized and not scaled:
            raise ValueError(
                f"checkpoint.initial_load_in_hf_quantized: true, but no tensor in {path} is "
                "block-scaled; set it to false, or change checkpoint.initial_load_path"
            )
        narrate(f"checkpoint: {summary(path, self._found)}")

    def read_metadata(self) -> Metadata:
        """Describe the text model's tensors under their release names."""
        return Metadata(
            state_dict_metadata={name: self._describe(name) for name in self._names},
            storage_data={},
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def _describe(self, name: str) -> TensorStorageMetadata:
        piece = self._found.pieces[name]
        dtype = torch.float32 if piece.scaled else DTYPES[self._stored[piece.source].code]
        size = torch.Size(piece.shape)
        whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every slice that this rank asked for into its tensors."""
        with Slices(self._stored) as slices:
            # Front to back through the files, as network file systems like it.
            for item in sorted(plan.items, key=self._place):
                self._load(slices, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> tuple[Path, int, int]:
        piece = self._found.pieces[item.storage_index.fqn]
        stored = self._stored[piece.source]
        return stored.file, stored.offset, piece.expert or 0

    def _load(self, slices: Slices, item: ReadItem, planner: LoadPlanner) -> None:
        piece = self._found.pieces[item.storage_index.fqn]
        target = planner.resolve_tensor(item).detach()
        target.copy_(slices.read(piece, tuple(item.storage_offsets), tuple(item.lengths)))
        planner.commit_tensor(item, target)


def summary(path: str | Path, found: Plan, others: str = "left out") -> str:
    """Count, in one line, what is read and what becomes of the others."""
    scaled = sum(piece.scaled for piece in found.pieces.values())
    parts = [f"{len(found.pieces)} tensors of the text model"]
    if scaled:
        parts.append(f"{scaled} of them block-scaled float8, dequantised")
    counts = [
        f"{len(names)} {kind} tensors"
        for kind, names in (("vision", found.vision), ("prediction (MTP)", found.prediction))
        if names
    ]
    if counts:
        parts.append(f"{others}: {' and '.join(counts)}")
    return f"{path}: {'; '.join(parts)}"
