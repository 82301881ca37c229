"""Choose an implementation of an operation by what a recipe asks for and what the machine can run.

A choice is made before anything runs and says why. What was asked for by name and cannot run is an
error: nothing slower takes its place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

Shape = Mapping[str, int]
"""Sizes that decide whether a kernel takes a call, by the dotted configuration key of each."""

ITEMSIZE = "training.mixed_precision_param"
"""Key of a shape: bytes of a number that layers compute in."""

REFERENCE = "torch"
AUTO = "auto"


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Attributes:
        name: what a recipe calls it.
        load: imports it. What it returns follows the operation's protocol (``kernels.backends``).
        why_not: (device "cpu" or "cuda", shape) -> why it cannot run there, or None if it can. A
            shape that is not taken is named with its key, its value and what is supported. Must
            not import what is expensive to import.
        automatic: whether "auto" may choose it.
    """

    name: str
    load: Callable[[], Any]
    why_not: Callable[[str, Shape], str | None] = lambda device, shape: None
    automatic: bool = False


@dataclass(frozen=True)
class Choice:
    """What computes an operation.

    Attributes:
        backend: its name.
        note: operation, backend and reason, for the log.
    """

    backend: str
    note: str


@dataclass(frozen=True)
class Operation:
    """An operation with a reference in plain torch and other implementations.

    Attributes:
        name: for the log.
        key: dotted configuration key that chooses.
        backends: by name, without the reference; "auto" tries them in this order.
        loaded: what has been imported, by name.
    """

    name: str
    key: str
    backends: dict[str, Backend] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def add(self, backend: Backend) -> None:
        """Offer one more implementation."""
        self.backends[backend.name] = backend

    def choose(self, wanted: str, device: str, shape: Shape) -> Choice:
        """Decide what a recipe's ``wanted`` runs.

        Args:
            wanted: "auto", "torch" or the name of a backend.
            device: "cpu" or "cuda".
            shape: what it will be called with.

        Raises:
            ValueError: ``wanted`` cannot run there; says why, and what selects the reference.
        """
        if wanted == AUTO:
            return self._automatic(device, shape)
        if wanted != REFERENCE:
            reason = self._backend(wanted).why_not(device, shape)
            if reason is not None:
                raise ValueError(
                    f"{self.key}: {wanted!r} cannot run here: {reason}; legal here: {REFERENCE!r} "
                    f"(the reference path) or {AUTO!r}"
                )
        return Choice(wanted, f"{self.name} kernel: {wanted}")

    def _automatic(self, device: str, shape: Shape) -> Choice:
        reasons = []
        for backend in self.backends.values():
            if not backend.automatic:
                continue
            reason = backend.why_not(device, shape)
            if reason is None:
                name = backend.name
                return Choice(name, f"{self.name} kernel: {name} ({AUTO} on {device})")
            reasons.append(f"; not {backend.name}: {reason}")
        note = f"{self.name} kernel: {REFERENCE} ({AUTO} on {device}{''.join(reasons)})"
        return Choice(REFERENCE, note)

    def load(self, name: str) -> Any:
        """The implementation ``name``, imported once.

        Raises:
            RuntimeError: it cannot be imported; names the key that selects the reference.
        """
        if name not in self.loaded:
            self.loaded[name] = self.guard(name, self._backend(name).load)()
        return self.loaded[name]

    def guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose failures to import, compile or launch name the key that chose it.

        Running out of memory stays what it is.
        """
        return partial(self._guarded, name, function)

    def _guarded(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"{self.key}: {name!r} failed to import, compile or launch ({error}); "
                f"{REFERENCE!r} selects the reference path"
            ) from error

    def _backend(self, name: str) -> Backend:
        if name not in self.backends:
            legal = ", ".join(map(repr, (AUTO, REFERENCE, *self.backends)))
            raise ValueError(f"{self.key}: {name!r} is no implementation; legal: {legal}")
        return self.backends[name]
