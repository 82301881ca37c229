"""What checkpoints hold of a model whose float32 weights are on the host."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.checkpointer.utils import canonical_fqn

from components.titan.streamed_optimizer import StreamedOptimizers
from components.titan.working_weights import reshard, restore_shards


class MasterWeights(ModelWrapper):
    """torchtitan's view of a model for checkpoints, with masters in place of trainable weights.

    Names, shapes and placements are the model's, so checkpoints are those of a run that keeps its
    weights in float32 on the device. A module may rename or take apart its weights when it saves
    them; such a module is given float32 weights on the device for that moment. What it makes of
    them belongs to the state dict alone and is kept by nobody else: each state dict is a new one.
    """

    def __init__(self, model_parts: list[nn.Module], optimizers: StreamedOptimizers) -> None:
        """
        Args:
            model_parts: before their first forward.
            optimizers: of these parts.
        """
        self._optimizers = optimizers
        self._parts = [_Part(part, optimizers) for part in model_parts]
        # Not torchtitan's, which keeps the first state dict for the whole run.
        self.model = model_parts

    def _get_state_dict(self) -> dict[str, Any]:
        return {name: value for part in self._parts for name, value in part.state().items()}

    def state_dict(self) -> dict[str, Any]:
        """Masters, frozen weights and buffers themselves; new tensors of modules that rewrite."""
        return self._get_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Masters, frozen weights and buffers take over what is there; then the working weights."""
        for part in self._parts:
            part.load(state_dict)
        self._optimizers.refresh_weights()

    def on_device(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with copies on the device in place of the masters.

        For adapters to other formats: they cut DTensors up and put them together, which needs the
        mesh's device. Gradients make room for the copies.

        Args:
            state_dict: of this class, in any dtype.
        """
        self._optimizers.zero_grad()
        copies = {}
        for part in self._parts:
            for name in part.direct.keys() & state_dict.keys():
                copies[name] = _like(part.weights[name], state_dict[name])
        return state_dict | copies


class _Part:
    """One model part and its masters.

    Attributes:
        direct: name in checkpoints -> master, of weights that are saved as they are.
        weights: name in checkpoints -> weight on the device, of the same.
    """

    def __init__(self, model: nn.Module, optimizers: StreamedOptimizers) -> None:
        self._model = model
        masters = optimizers.masters
        reshard(model)
        saved = model.state_dict().keys()
        self.direct: dict[str, torch.Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self._rewritten: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = []
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in masters:
                    continue
                whole = canonical_fqn(f"{prefix}.{name}" if prefix else name)
                if whole in saved:
                    self.direct[whole] = masters[parameter]
                    self.weights[whole] = parameter
                else:
                    self._rewritten.append((module, name, parameter, masters[parameter]))

    def state(self) -> dict[str, Any]:
        with self._in_float32():
            state = self._model.state_dict()
        return state | self.direct

    @torch.no_grad()
    def load(self, state_dict: dict[str, Any]) -> None:
        rest = {k: value for k, value in state_dict.items() if k not in self.direct}
        with self._in_float32() as copies:
            # Not strict: other things than the model are in there as well.
            self._model.load_state_dict(rest, strict=False)
        for copy, (*_, master) in zip(copies, self._rewritten, strict=True):
            _take_over(master, copy)
        for name, master in self.direct.items():
            if name in state_dict:
                _take_over(master, state_dict[name])

    @contextlib.contextmanager
    def _in_float32(self) -> Iterator[list[nn.Parameter]]:
        """Modules that rewrite their weights hold float32 copies of the masters on the device."""
        reshard(self._model)
        copies = []
        for module, name, parameter, master in self._rewritten:
            copy = nn.Parameter(_like(parameter, master))
            copies.append(copy)
            module.register_parameter(name, copy)
        try:
            yield copies
        finally:
            for module, name, parameter, _ in self._rewritten:
                module.register_parameter(name, parameter)
            restore_shards(self._model)


@torch.no_grad()
def _like(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A copy of a value beside the weight, in its own dtype."""
    copy = torch.empty_like(weight, dtype=value.dtype, requires_grad=False)
    _take_over(copy, value)
    return copy


@torch.no_grad()
def _take_over(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy what this rank holds of a value, from whatever device."""
    if value is target:
        return
    if isinstance(target, DTensor) and isinstance(value, DTensor):
        if value.placements != target.placements:
            value = value.redistribute(placements=target.placements)
        target.to_local().copy_(value.to_local())
    else:
        target.copy_(value)
