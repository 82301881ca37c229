"""Which layer and which module are at work, in forward, in a repeated forward and in backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    ActivationWrapper,
)
from torch.utils._pytree import tree_leaves

Work = Literal["data", "forward", "recompute", "rebuild", "loss", "backward", "optimizer"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a step something happens.

    Attributes:
        work: what is being done. "recompute" is a layer's forward that runs again inside backward,
            "rebuild" one that does so without a graph, for the input of a later layer. What a
            layer's backward runs of its modules again, piece by piece, is "backward".
        module: dotted name of the innermost module at work, "" for the model itself or none.
    """

    work: Work
    module: str = ""

    @property
    def layer(self) -> str:
        """Name of the decoder layer ("layers.3"), or "" outside of them."""
        parts = self.module.split(".")
        return ".".join(parts[:2]) if parts[0] == "layers" and len(parts) > 1 else ""

    @property
    def unit(self) -> str:
        """Name of the layer, or of the model's own module ("norm") outside of them."""
        return self.layer or self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.work} of {self.module}" if self.module else self.work


def clean_name(name: str) -> str:
    """A module's or parameter's dotted name without the parts that checkpoint wrappers add."""
    return name.replace(_CHECKPOINT_PREFIX, "").removesuffix("." + _CHECKPOINT_PREFIX[:-1])


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: a forward is then a repeated one."""
    return torch._C._current_graph_task_id() != -1


class PlaceTracker:
    """Follows a step through the modules of a model, by hooks that change no value.

    In backward no module runs. The graph is marked instead: the node that made a module's output
    belongs to that module, the node that made its input to the module around it, and the module
    whose node ran last is the one at work.

    Attributes:
        here: the place now.
        on_change: called with the new place whenever it changes.
        on_enter: called with module, name, (args, kwargs) and whether it runs inside backward.
        on_exit: called with name and output (None after an exception).
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self.here = Place("data")
        self.on_change: list[Callable[[Place], None]] = []
        self.on_enter: list[Callable[[nn.Module, str, Any, bool], None]] = []
        self.on_exit: list[Callable[[str, Any], None]] = []
        self._parts = parts
        # In an autograd node's metadata: the module that it belongs to.
        self._key = f"module at work {id(self)}"
        self._base: Work = "data"
        self._stack: list[tuple[str, Work]] = []
        self._marked: str | None = None
        self._handles: list[Any] = []

    @property
    def repeating(self) -> bool:
        """Whether a module's forward is running inside backward."""
        return bool(self._stack) and self._stack[-1][1] in ("recompute", "rebuild", "backward")

    def attach(self) -> None:
        """Register the hooks; checkpoint wrappers are left out, so recomputation is seen inside."""
        for part in self._parts:
            for raw, module in part.named_modules():
                if isinstance(module, ActivationWrapper):
                    continue
                name = clean_name(raw)
                before, after = self._hooks(name)
                self._handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, always_call=True),
                ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def at(self, work: Work) -> None:
        """Say what is done from now on while no module is at work."""
        self._base, self._marked = work, None
        self._stack.clear()
        self._settle()

    def _hooks(self, name: str) -> tuple[Callable, Callable]:
        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self._enter(module, name, (args, kwargs))

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self._leave(name, output)

        return before, after

    def _enter(self, module: nn.Module, name: str, inputs: Any) -> None:
        again = in_backward()
        around = self._stack[-1][0] if self._stack else ""
        if not again:
            self._marked = None
            self._mark(inputs, around)
        self._stack.append((name, self._work(name) if again else "forward"))
        if not name and not again:
            self._base = "forward"
        self._settle()
        for callback in self.on_enter:
            callback(module, name, inputs, again)

    def _work(self, name: str) -> Work:
        """What a module that is entered inside backward does there."""
        around = self._stack[-1][1] if self._stack else "backward"
        if around in ("recompute", "rebuild"):
            return around
        if name != Place("backward", name).unit:
            return "backward"
        return "recompute" if torch.is_grad_enabled() else "rebuild"

    def _leave(self, name: str, output: Any) -> None:
        # An exception may have skipped modules further in.
        while self._stack and self._stack.pop()[0] != name:
            pass
        if not in_backward():
            self._mark(output, name)
        if not name and self._base == "forward" and not self._stack:
            self._base = "loss"
        for callback in self.on_exit:
            callback(name, output)
        self._settle()

    def _mark(self, values: Any, name: str) -> None:
        for value in tree_leaves(values):
            node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
            # The first to claim a node made it: a module's output is the next one's input.
            if node is not None and self._key not in node.metadata:
                node.metadata[self._key] = name
                node.register_prehook(self._marker(name))

    def _marker(self, name: str) -> Callable:
        def marked(gradients: Any) -> None:
            self._marked = name
            self._settle()

        return marked

    def _settle(self) -> None:
        place = self._place()
        if place != self.here:
            self.here = place
            for callback in self.on_change:
                callback(place)

    def _place(self) -> Place:
        if self._stack:
            name, work = self._stack[-1]
            return Place("loss" if (work, self._base) == ("forward", "loss") else work, name)
        if self._marked is None:
            return Place(self._base)
        # Chunked losses run the head and its backward chunk by chunk: that is the loss.
        head = self._base == "loss" and self._marked.partition(".")[0] == "lm_head"
        return Place("loss" if head else "backward", self._marked)
