"""What the tensor ranks of a run send, counted where torch dispatches its collectives.

Transfers of layers and of the indexer go through torchtitan's and torch's own collectives, which
count nothing.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components.titan.trainer import RecipeTrainer

GATHER = torch.ops.c10d._allgather_base_.default
SCATTER = torch.ops.c10d._reduce_scatter_base_.default
SUM = torch.ops._c10d_functional.all_reduce.default
OUTSIDE = "outside"

Sent = Counter[tuple[str, str, str]]
"""Elements by layer or "outside", "forward" or "backward", and "gathered", "pools", "scattered" or
"summed". A gather of n sends n to each of the others; a sum, as scatter and gather, twice a share
of n to each."""


class TensorTraffic(TorchDispatchMode):
    """Counts while it is on.

    Args:
        trainer: of the run; its model's layers say where they begin and end.
    """

    def __init__(self, trainer: RecipeTrainer) -> None:
        super().__init__()
        self.sent: Sent = Counter()
        group = trainer.parallel_dims.get_mesh("tp").get_group()
        self._name, self._ranks = group.group_name, group.size()
        self._where = OUTSIDE, "forward"
        model: Any = trainer.model_parts[0]
        self._watch(model.tok_embeddings, OUTSIDE)
        for name, layer in model.layers.items():
            self._watch(layer, name)

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        """From a module's input to its output it is forward; backward begins at its output."""

        def entered(*_: Any) -> None:
            self._where = name, "forward"

        def left(module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
            self._where = OUTSIDE, "forward"
            if out.requires_grad:
                out.register_hook(returned)

        def returned(grad: torch.Tensor) -> None:
            self._where = name, "backward"

        module.register_forward_pre_hook(entered)
        module.register_forward_hook(left)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is GATHER:
            out, mine = args[:2]
            what = "pools" if mine.dtype == torch.int32 else "gathered"
            self.sent[*self._where, what] += out.numel() - mine.numel()
        elif function is SCATTER:
            mine, rows = args[:2]
            self.sent[*self._where, "scattered"] += rows.numel() - mine.numel()
        elif function is SUM and args[2] == self._name:
            share = args[0].numel() * (self._ranks - 1) / self._ranks
            self.sent[*self._where, "summed"] += int(2 * share)
        return function(*args, **(kwargs or {}))


def whole_on_every_rank(trainer: RecipeTrainer) -> Counter[str]:
    """Elements of each layer's weights that all tensor ranks have, and that have a gradient."""
    found: Counter[str] = Counter()
    for name, layer in trainer.model_parts[0].layers.items():
        for parameter in layer.parameters():
            across = parameter.device_mesh.mesh_dim_names.index("tp")
            if parameter.grad is not None and parameter.placements[across].is_replicate():
                found[name] += parameter.numel()
    return found
