"""torchtitan's optimizer container with AdamW's state on the host."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    load_flat_optim_state_dict,
)

from components.core.shards import local_of
from components.offload.accountant import HostBudgetError, gib, host_accountant
from components.offload.claim import claim, gather
from components.offload.cores import threads
from components.offload.slabs import Slab, pinned_bytes
from components.streamed_adamw.host import host_bytes
from components.streamed_adamw.layout import lay_out, rounded
from components.streamed_adamw.optimizer import OffloadStreamAdamW
from components.streamed_adamw.split import DIGITS
from components.titan.story import narrate
from components.titan.working_weights import use_compute_dtypes

_LISTED = 3
"""Weights that a message names."""

_IMPLEMENTATION = (".fused", ".foreach")
"""Options of a parameter group that say how an update is run, not what it computes."""

_ALIGNMENT = 64
"""Bytes; every optimizer's memory begins at a multiple of it."""


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN or inf, and the recipe says that this ends the run."""


class StreamedOptimizers(OptimizersContainer[OffloadStreamAdamW]):
    """One ``OffloadStreamAdamW`` per model part, all in one piece of pinned host memory.

    Checkpoints hold what those of ``torch.optim.AdamW`` hold, under the same names. After
    construction the model's weights are in the dtype that layers compute in (see
    ``working_weights``); ``masters`` has them in float32.

    Attributes:
        skipped: steps left out so far because a gradient was not finite.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        owner: str
        """Dotted key of the settings, for messages and the host-memory account."""

        bucket_parameters: int
        """Parameters that move at once, at most."""

        slots: int
        """Buckets on the device at a time."""

        split: float | Literal["auto"]
        """Share of the parameters that the CPU updates, or "auto"."""

        cpu_threads: int | None
        """Threads of the CPU's update; None: this rank's share of the cores near its device."""

        host_budget: int | None
        """Bytes of host memory of one rank; None: as many as needed."""

        nonfinite: Literal["raise", "skip"]
        """What a gradient that is not finite does to the step."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Collective: host memory is pinned on all ranks or on none.

        Raises:
            HostBudgetError: the state does not fit into the budget or into the machine.
            PinningRefused: the system refused some rank.
            ValueError: more threads than some machine has cores.
        """
        self.config = config
        self.skipped = 0
        device = next(model_parts[0].parameters()).device
        cpu_threads = threads(f"{config.owner}.cpu_threads", config.cpu_threads, device)
        self._slab: Slab | None = self._pin(model_parts)
        settings = {
            "host": _Parts(self._slab),
            "bucket_parameters": config.bucket_parameters,
            "slots": config.slots,
            "split": config.split,
            "threads": cpu_threads,
        }
        with_host = copy.copy(config)
        with_host.optimizer_factory_kwargs_by_name = {"AdamW": settings}
        try:
            super().__init__(with_host, model_parts=model_parts)
            if config.split == "auto":
                self._agree_on_share()
            changed = sum(use_compute_dtypes(part) for part in model_parts)
        except BaseException:
            self.close()
            raise
        kept = f"{changed} weights" if changed else "none"
        narrate(
            f"optimizer: fp32 weights and AdamW's moments in {gib(self._slab.pinned)} of host "
            f"memory per rank; narrower on the device, as layers compute: {kept}"
        )

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name != "AdamW":
            raise NotImplementedError(f"optimizer {name!r} cannot be streamed; legal: AdamW")
        return OffloadStreamAdamW

    @property
    def masters(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Trainable weight -> its float32 value: a CPU tensor, or a DTensor with a CPU shard."""
        return {p: master for each in self.optimizers for p, master in each.masters.items()}

    def refresh_weights(self) -> None:
        """Give the device the masters' values, after those were changed from outside."""
        for optimizer in self.optimizers:
            optimizer.refresh_weights()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every weight, or none if a gradient of any rank is not finite. Collective.

        Raises:
            NonFiniteGradient: on all ranks, if ``nonfinite`` is "raise".
        """
        assert closure is None
        if self._gradients_are_finite():
            self._update()
            return
        if self.config.nonfinite == "raise":
            raise NonFiniteGradient(self._refusal())
        self.skipped += 1
        with _unchanged_biases(self.model_parts):
            # Hooks observe the step and clear its counts.
            self._update_nothing()

    # torch would call the hooks around the step, before it is known whether there is one.
    step.hooked = True  # type: ignore[attr-defined]

    @Optimizer.profile_hook_step
    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    @Optimizer.profile_hook_step
    def _update_nothing(self) -> None:
        pass

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy in place, from a checkpoint of any implementation of AdamW."""
        for optimizer in self.optimizers:
            own = {
                name: value
                for name, value in get_flat_optim_state_dict(optimizer).items()
                if name.startswith("param_groups.") and name.endswith(_IMPLEMENTATION)
            }
            load_flat_optim_state_dict(optimizer, state_dict | own)

    def close(self) -> None:
        """Unpin the host memory. The optimizer is of no use afterwards."""
        for optimizer in getattr(self, "optimizers", []):
            optimizer.close()
        if self._slab is not None:
            self._slab.close()
            host_accountant().release(self.config.owner)
        self._slab = None

    @property
    def pinned(self) -> int:
        """Bytes of host memory taken on this rank."""
        return 0 if self._slab is None else self._slab.pinned

    def _pin(self, model_parts: list[nn.Module]) -> Slab:
        config = self.config
        payload = sum(_payload(part, config) for part in model_parts)
        needed = max(gather(pinned_bytes(payload)))
        if config.host_budget is not None and config.host_budget < needed:
            raise HostBudgetError(
                f"{config.owner}.host_budget_gib: {gib(config.host_budget)} do not hold the "
                f"optimizer state of one rank, which takes {gib(needed)}; "
                f"use {gib_above(needed):g} or more, or null"
            )
        device = next(model_parts[0].parameters()).device
        # A budget that is never filled may be larger than the machine: what is needed counts.
        return claim(config.owner, payload, None, device)

    def _agree_on_share(self) -> None:
        """Ranks measure different shares; one for all can be written into a recipe. Collective."""
        found = [each.measured for each in self.optimizers if each.measured is not None]
        everywhere = [m for each in gather(found) for m in each if m.parameters]
        if not everywhere:
            return
        share = round(sum(each.share for each in everywhere) / len(everywhere), DIGITS)
        for optimizer in self.optimizers:
            optimizer.set_share(share)
        first = everywhere[0]
        narrate(
            f"{self.config.owner}.split: auto is {share:g}, the mean of all ranks; on the first, "
            f"{first.parameters:,} parameters took {first.streaming:.3g} s streamed, "
            f"{first.processor:.3g} s by the CPU and {first.both:.3g} s at the best share of both. "
            f"split={share:g} updates the same way again"
        )

    def _gradients_are_finite(self) -> bool:
        """On all ranks. One pass over the gradients, one number sent, one wait for the device."""
        gradients = [g for g in map(_gradient, self.masters) if g is not None and g.numel()]
        # NaN is larger than any number to a maximum norm.
        norm = torch.nn.utils.get_total_norm(gradients, math.inf)
        broken = (~norm.isfinite()).to(torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            broken = broken.to(next(iter(self.masters)).device)
            dist.all_reduce(broken, dist.ReduceOp.MAX)
        return not broken.item()

    def _refusal(self) -> str:
        """The same on all ranks. Collective."""
        mine = {
            name: (gradient := _gradient(parameter)) is not None and not gradient.isfinite().all()
            for each in self.optimizers
            for name, parameter in _named(each)
        }
        broken: dict[str, bool] = {}
        for each in gather({name: bool(value) for name, value in mine.items()}):
            broken |= {name: broken.get(name, False) or value for name, value in each.items()}
        found = [name for name, value in broken.items() if value]
        listed = f"{', '.join(found[:_LISTED])}{', ...' * (len(found) > _LISTED)}"
        where = f"{len(found)} of {len(broken)} weights ({listed})"
        if len(found) == len(broken):
            where = f"all {len(broken)} weights (clipping spreads one NaN over all of them)"
        return (
            f"{self.config.owner}.nonfinite: 'raise', and after clipping the gradients of {where} "
            "hold NaN or inf; weights and optimizer state are as before the step. Use 'skip' to "
            "leave such steps out"
        )


def gib_above(nbytes: int) -> float:
    """The hundredth of a GiB at or above so many bytes."""
    return math.ceil(nbytes / 2**30 * 100) / 100


def _payload(part: nn.Module, config: StreamedOptimizers.Config) -> int:
    """Bytes that the optimizer of a model part will ask for."""
    counts = [local_of(p).numel() for p in part.parameters() if p.requires_grad]
    nbytes = host_bytes(lay_out(counts), config.bucket_parameters, config.split != 0)
    return rounded(nbytes, _ALIGNMENT)


class _Parts:
    """Hands out a slab's memory, one part behind the other."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._free = 0

    def __call__(self, nbytes: int) -> "_Part":
        part = _Part(self._slab, self._free)
        self._free += rounded(nbytes, _ALIGNMENT)
        return part


@dataclass(frozen=True)
class _Part:
    slab: Slab
    start: int

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        return self.slab.view(self.start + start, nbytes)


def _named(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else local_of(parameter.grad)


@contextlib.contextmanager
def _unchanged_biases(model_parts: list[nn.Module]) -> Iterator[None]:
    """Undo what balancing of experts does to their biases."""
    biases = [
        bias
        for part in model_parts
        for module in part.modules()
        if isinstance(bias := getattr(module, "expert_bias_E", None), torch.Tensor)
    ]
    kept = [local_of(bias).clone() for bias in biases]
    yield
    for bias, value in zip(biases, kept, strict=True):
        local_of(bias).copy_(value)
