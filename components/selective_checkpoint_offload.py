"""Keep the inputs of recomputed layers in host memory until backward comes to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from components.core.base import Component, MemoryTerm, Target
from components.core.modules import modules_of
from components.core.problems import Problem
from components.core.registry import loss_term
from components.offload.accountant import GIB, gib, host_accountant
from components.offload.claim import claim
from components.offload.engine import AWAITING_COPY, Counts, Engine
from components.offload.layout import Unit, units_of, working_sets
from components.offload.order import choose, forward_order, peak
from components.offload.slabs import Slab, cpus_near, pinned_bytes
from components.offload.streams import lanes_for
from components.recompute.layer import RecomputedLayer
from components.titan.plan import RunPlan
from components.titan.story import narrate

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer

LARGEST = 2**20
"""GiB; no machine has a PiB of memory."""

SMALLEST = {"cuda": 2**20, "cpu": 0}
"""Bytes below which a tensor is not worth a copy, by device."""


class SelectiveCheckpointOffload(Component):
    """Every kept layer input, and every kept sub-layer output, that fits into a budget of pinned
    host memory goes there in forward and comes back in backward, one layer ahead of its use.

    At most two that have come back are on the device. What does not fit stays there. Losses and
    gradients are those of the run without, to the bit. The memory is pinned once, before the first
    step, and is at most one page larger than what is kept in it.
    """

    name = "selective_checkpoint_offload"
    summary = "layer inputs wait for backward in pinned host memory, two at a time on the device"
    source = "arXiv 2609.14306, section 3.3"
    relieves = "activations"
    requires = ("layer_recompute",)
    after = ("layer_recompute",)
    scalars = {
        "offload/boundaries": "layer inputs sent to the host in the step, all passes, first rank",
        "offload/boundaries_left": "layer inputs that stayed on the device in the step, first rank",
        "offload/sent_gib": "sent to the host in the step, all passes, first rank, GiB",
        "offload/payload_gib": "host memory for layer inputs, one rank, GiB",
        "offload/pinned_gib": "host memory pinned for layer inputs, rounding included, GiB",
    }

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        host_budget_gib: float | None = None
        """Pinned host memory of one rank, in GiB, above 0; null: as much as everything takes. What
        does not fit into it stays on the device."""

        streams: bool = True
        """Copy beside the computation, on a CUDA stream for each direction: two inputs at a time
        are on the device until their copies are done, and one comes back early. false: copies are
        steps of the computation, which waits for each; one input at a time is on the device."""

        order: Literal["forward", "peak"] = "forward"
        """Which inputs go where not all fit. forward: the earliest, which is best for equal sizes.
        peak: those that lower the highest point of backward, and no more; where the model does not
        say what its layers need, as forward."""

        def __post_init__(self) -> None:
            budget = self.host_budget_gib
            if budget is not None and not 0 <= budget < LARGEST:
                raise ValueError(
                    f"host_budget_gib is {budget}; it must be a number of GiB above 0 and below "
                    f"{LARGEST}, or null"
                )

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.counts = Counts()
        self._payload = 0
        self._chosen: frozenset[int] = frozenset()
        self._units = 0
        self._slab: Slab | None = None
        self._engine: Engine | None = None
        self._told = False

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        if recipe.components.full_recompute.enabled:
            yield Problem(
                f"{self.path}.enabled",
                "true has no effect beside components.full_recompute, which keeps its inputs to "
                "itself",
                "set components.full_recompute.enabled=false "
                "components.layer_recompute.enabled=true",
            )
        if recipe.parallelism.pipeline_parallel_degree > 1:
            yield Problem(
                f"{self.path}.enabled",
                "true cannot be combined with parallelism.pipeline_parallel_degree "
                f"{recipe.parallelism.pipeline_parallel_degree}: its micro-batches come back in "
                "another order",
                f"use a degree of 1, or {self.path}.enabled=false",
            )
        elif recipe.components.layer_recompute.enabled:
            yield from self._check_budget(recipe, target)

    def _check_budget(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        units = units_of(recipe)
        smallest, total = min(u.nbytes for u in units), sum(u.nbytes for u in units)
        key, budget = f"{self.path}.host_budget_gib", self._budget()
        if budget is not None and budget < smallest:
            yield Problem(
                key,
                f"{self.config.host_budget_gib:g} holds no layer's input, which takes "
                f"{gib(smallest)}: nothing would be offloaded",
                f"use {smallest / GIB:.3g} or more (all {len(units)}: {total / GIB:.3g}), null, or "
                f"{self.path}.enabled=false",
            )
        elif len(units) <= (anyway := 1 + self._early()[1]):
            yield Problem(
                f"{self.path}.enabled",
                f"true saves nothing: of the {len(units)} layer input{'s' * (len(units) > 1)} that "
                f"components.layer_recompute keeps, {('', 'one', 'two')[anyway]} at a time "
                f"{'are' if anyway > 1 else 'is'} on the device anyway",
                f"use a smaller components.layer_recompute.every, or {self.path}.enabled=false",
            )
        elif not self._choose(recipe, units, target):
            yield Problem(
                f"{self.path}.order",
                "'peak' finds no layer input whose offload would lower the peak",
                f"use {self.path}.enabled=false",
            )
        memory = recipe.hardware.host_memory
        ranks = min(target.ranks, recipe.hardware.ranks_per_node)
        asked = pinned_bytes(total) if budget is None else budget
        if memory is not None and asked * ranks > memory:
            yield Problem(
                key,
                f"{ranks} rank{'s' * (ranks > 1)} of a machine with {gib(asked)} each is more than "
                f"hardware.host_memory {gib(memory)}",
                f"use at most {memory / ranks / GIB:.3g}",
            )

    def apply(self, plan: RunPlan) -> None:
        units = units_of(plan.recipe)
        target = Target(plan.device, plan.world_size)
        self._units, self._chosen = len(units), self._choose(plan.recipe, units, target)
        self._payload = sum(units[index].nbytes for index in self._chosen)

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What leaves the device, but for the one or two that are there in backward; what is
        pinned."""
        units = units_of(recipe)
        sizes, chosen = [unit.nbytes for unit in units], self._choose(recipe, units, target)
        # A pass without working sets: the largest sum of boundaries that are there at one time.
        held = peak(sizes, [0] * len(sizes), 0, chosen, *self._early())
        return [
            MemoryTerm("what is kept for backward and waits on the host", held - sum(sizes)),
            MemoryTerm(
                "pinned for what is kept for backward",
                pinned_bytes(sum(sizes[index] for index in chosen)),
                "host",
            ),
        ]

    def on_built(self, trainer: "RecipeTrainer") -> None:
        """Pin the memory, on all ranks or on none, and tell the layers."""
        recomputed = modules_of(trainer.model_parts, RecomputedLayer)
        if not recomputed:
            raise ValueError(
                f"{self.path}.enabled: true needs recomputed layers; "
                "set components.layer_recompute.enabled=true"
            )
        if not self._chosen:
            narrate(f"{self.path}: nothing is offloaded (host_budget_gib is too small)")
            return
        device = trainer.device
        self._slab = claim(self.path, self._payload, self._budget(), device)
        self._engine = self.make_engine(self._slab, device)
        for layer in recomputed:
            layer.store = self._engine
        place = "near the device" if cpus_near(device) else "anywhere (NUMA node not known)"
        narrate(
            f"checkpoint offload: {len(self._chosen)} of {self._units} layer inputs, "
            f"{gib(self._slab.pinned)} of host memory per rank, {place}"
        )

    def make_engine(self, slab: Slab, device: torch.device) -> Engine:
        """The engine over a slab; tests make another."""
        lanes = lanes_for(device, self.config.streams)
        return Engine(slab, lanes, device, self._chosen, SMALLEST[device.type])

    def before_step(self, trainer: "RecipeTrainer") -> None:
        self.counts = Counts()
        if self._engine is not None:
            self._engine.counts = self.counts

    def before_microbatch(self, trainer: "RecipeTrainer") -> None:
        if self._engine is not None:
            self._engine.begin()

    def after_microbatch(self, trainer: "RecipeTrainer") -> None:
        if self._engine is not None:
            self._engine.end()

    def after_step(self, trainer: "RecipeTrainer") -> None:
        """Say once what stayed on the device although there was a place for it."""
        unplanned = {why: n for why, n in self.counts.left.items() if why != "not chosen"}
        if unplanned and self._engine is not None and not self._told:
            self._told = True
            reasons = ", ".join(f"{number} ({why})" for why, number in unplanned.items())
            narrate(f"checkpoint offload: layer inputs left on the device: {reasons}")

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        """Nothing where nothing is offloaded, which was said at the start."""
        if self._slab is None:
            return {}
        return {
            "offload/boundaries": self.counts.offloaded,
            "offload/boundaries_left": self.counts.left.total(),
            "offload/sent_gib": self.counts.nbytes / GIB,
            "offload/payload_gib": self._slab.payload / GIB,
            "offload/pinned_gib": self._slab.pinned / GIB,
        }

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._slab is not None:
            self._slab.close()
            host_accountant().release(self.path)
        self._engine = self._slab = None

    def _budget(self) -> int | None:
        budget = self.config.host_budget_gib
        return None if budget is None else int(budget * GIB)

    def _early(self) -> tuple[int, int]:
        """How many wait for their copy, and how many come back before they are needed."""
        return (AWAITING_COPY, 1) if self.config.streams else (0, 0)

    def _choose(self, recipe: "Recipe", units: list[Unit], target: Target) -> frozenset[int]:
        sizes, budget = [unit.nbytes for unit in units], self._budget()
        by_peak = self.config.order == "peak"
        needed = working_sets(recipe, units, target.device) if by_peak else None
        if needed is None:
            return forward_order(sizes, budget)
        loss = loss_term(recipe, target).nbytes
        return choose(sizes, needed, loss, budget, *self._early())
