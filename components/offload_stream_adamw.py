"""AdamW's state in pinned host memory, streamed through the device or updated by the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from components.core.base import Component, MemoryTerm, Target
from components.core.problems import Problem
from components.core.sizes import FLOAT32
from components.core.units import Count
from components.models.counts import count_parameters
from components.offload.accountant import GIB, gib
from components.offload.slabs import pinned_bytes
from components.streamed_adamw.engine import staging_limit
from components.streamed_adamw.host import host_bytes
from components.streamed_adamw.layout import CUT, lay_out
from components.titan.plan import RunPlan
from components.titan.story import narrate
from components.titan.streamed_optimizer import StreamedOptimizers, gib_above

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer

LARGEST = 2**20
"""GiB; no machine has a PiB of memory."""

SKIPPED = "optimizer/skipped_steps"


class OffloadStreamAdamW(Component):
    """Float32 weights and both moments live on the host, 12 bytes per parameter; the device keeps
    weights in the dtype that layers compute in, and float32 gradients.

    A step updates a bucket of parameters after the other: some stream through the device, the CPU
    updates the rest at the same time. Weights, losses and checkpoints are those of the run without,
    to the bit where the same kernel updates; on a GPU the CPU's share may differ in the last place.
    """

    name = "offload_stream_adamw"
    summary = "fp32 weights and AdamW moments in pinned host memory; 6 bytes per parameter stay"
    source = "arXiv 2609.14306, algorithm 4"
    relieves = "optimizer state"
    scalars = {
        "optimizer/host_gib": "host memory pinned for weights and moments, one rank, GiB",
        "optimizer/staging_gib": "device memory taken for the last optimizer step, first rank, GiB",
        "optimizer/cpu_share": "parameters updated by the CPU over all, last step, first rank",
        "optimizer/streamed_seconds": "last step, until the last bucket was on the host again; "
        "first rank, seconds",
        "optimizer/cpu_seconds": "last step, until the CPU's last weight was on the device; "
        "first rank, seconds",
        SKIPPED: "steps left out because a gradient was not finite, since this process began",
    }

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        bucket_parameters: Count = 100_000_000
        """Parameters of a bucket at most, 64 or more; a larger parameter is cut. A bucket on its
        way takes 12 bytes of device memory per parameter."""

        slots: int = 2
        """Buckets on the device at a time. 1: copies and updates wait for each other."""

        split: float | Literal["auto"] = "auto"
        """Share of the parameters that the CPU updates, 0 to 1. auto: measured at the start, so
        that both ways end together, or 0 or 1 where one alone is as fast; the mean of all ranks
        holds for all and is told at the start. On a CPU, where both ways are the same processor, 0.
        A run repeats itself to the bit at a given share alone."""

        cpu_threads: int | None = None
        """Threads of the CPU's share, at most the machine's cores; null: the cores near the rank's
        GPU over the ranks that are near them."""

        host_budget_gib: float | None = None
        """Pinned host memory of one rank, in GiB, that must hold everything; null: no limit but the
        machine's."""

        nonfinite: Literal["raise", "skip"] = "raise"
        """What NaN or inf in any rank's gradients does. raise: the run ends before anything is
        updated. skip: the step updates nothing; the learning rate's schedule goes on. A loss that
        is not finite ends the run in either case."""

        def __post_init__(self) -> None:
            if self.bucket_parameters < CUT:
                raise ValueError(
                    f"bucket_parameters is {self.bucket_parameters}; it must be at least {CUT}"
                )
            if self.slots < 1:
                raise ValueError(f"slots is {self.slots}; it must be at least 1")
            if self.split != "auto" and not 0 <= self.split <= 1:
                raise ValueError(
                    f"split is {self.split}; it must be auto, or a number from 0 (all streamed) to "
                    "1 (all by the CPU)"
                )
            if self.cpu_threads is not None and self.cpu_threads < 1:
                raise ValueError(
                    f"cpu_threads is {self.cpu_threads}; it must be at least 1, or null"
                )
            budget = self.host_budget_gib
            if budget is not None and not 0 < budget < LARGEST:
                raise ValueError(
                    f"host_budget_gib is {budget}; it must be a number of GiB above 0 and below "
                    f"{LARGEST}, or null"
                )

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._optimizers: StreamedOptimizers | None = None
        self._skipped = 0

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        implementation = recipe.optimizer.implementation
        if implementation != "fused":
            yield Problem(
                "optimizer.implementation",
                f"{implementation!r} cannot be combined with {self.path}, which updates with "
                "torch's fused kernel",
                f"use fused, or {self.path}.enabled=false",
            )
        if recipe.training.dtype != "float32":
            yield Problem(
                "training.dtype",
                f"{recipe.training.dtype!r} cannot be combined with {self.path}, which makes its "
                "float32 weights from the initial ones; layers compute in "
                "training.mixed_precision_param",
                f"use float32, or {self.path}.enabled=false",
            )
        if recipe.training.enable_cpu_offload:
            yield Problem(
                "training.enable_cpu_offload",
                f"true cannot be combined with {self.path}: it keeps weights and gradients on the "
                "host as well",
                f"use false, or {self.path}.enabled=false",
            )
        yield from self._check_host(recipe, target)

    def _check_host(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        needed = self._pinned(recipe, target)
        budget, memory = self._budget(), recipe.hardware.host_memory
        key = f"{self.path}.host_budget_gib"
        if budget is not None and budget < needed:
            yield Problem(
                key,
                f"{self.config.host_budget_gib:g} GiB do not hold the optimizer state of one rank, "
                f"which takes {gib(needed)}",
                f"use {gib_above(needed):g} or more, null, or more ranks",
            )
        ranks = min(target.ranks, recipe.hardware.ranks_per_node)
        if memory is not None and needed * ranks > memory:
            yield Problem(
                f"{self.path}.enabled",
                f"true needs {gib(needed * ranks)} of a machine's memory ({ranks} "
                f"rank{'s' * (ranks > 1)} x {gib(needed)}), and hardware.host_memory is "
                f"{gib(memory)}",
                f"use more ranks, fewer per machine, or {self.path}.enabled=false",
            )

    def apply(self, plan: RunPlan) -> None:
        stock, config = plan.config.optimizer, self.config
        streamed = StreamedOptimizers.Config(
            param_groups=stock.param_groups,
            implementation="fused",
            owner=self.path,
            bucket_parameters=config.bucket_parameters,
            slots=config.slots,
            split=self.split_on(plan.device),
            cpu_threads=config.cpu_threads,
            host_budget=self._budget(),
            nonfinite=config.nonfinite,
        )
        plan.set_optimizer(self.name, streamed)
        # Not when the trainer stands: it may never, and the host memory is to be released.
        plan.after_optimizer(self._meet, first=True)

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What leaves the device, what computes instead, and what a step takes for a while."""
        trained = self._trained(recipe, target)
        stock = recipe.optimizer.bytes_per_parameter(recipe.training.dtype)
        computing = TORCH_DTYPE_MAP[recipe.training.mixed_precision_param].itemsize
        config = self.config
        staging = staging_limit(
            trained, config.bucket_parameters, config.slots, self.split_on(target.device)
        )
        return [
            MemoryTerm("fp32 weights and moments, kept on the host", -trained * (stock - FLOAT32)),
            MemoryTerm("weights in the dtype that layers compute in", trained * computing),
            MemoryTerm("staging of the optimizer step", staging, note="at most"),
            MemoryTerm("pinned for fp32 weights and moments", self._pinned(recipe, target), "host"),
        ]

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        optimizers = _streamed(trainer)
        reports = [each.report for each in optimizers if each.report is not None]
        streamed = sum(report.streamed for report in reports)
        processed = sum(report.processed for report in reports)
        if optimizers.skipped:
            # From now on in every step's line, and before that in none.
            trainer.metrics_processor.headlines[SKIPPED] = "skipped"
        return {
            "optimizer/host_gib": optimizers.pinned / GIB,
            "optimizer/staging_gib": max((r.staging_bytes for r in reports), default=0) / GIB,
            "optimizer/cpu_share": processed / max(streamed + processed, 1),
            "optimizer/streamed_seconds": sum(report.streaming_seconds for report in reports),
            "optimizer/cpu_seconds": sum(report.processor_seconds for report in reports),
            SKIPPED: optimizers.skipped,
        }

    def after_step(self, trainer: "RecipeTrainer") -> None:
        """Tell of a step that was left out."""
        skipped = _streamed(trainer).skipped
        if skipped > self._skipped:
            narrate(
                f"step {trainer.step} updated nothing: a gradient was not finite "
                f"({self.path}.nonfinite: skip; {skipped} so far)"
            )
        self._skipped = skipped

    def _meet(self, optimizers: OptimizersContainer, *_: object) -> None:
        assert isinstance(optimizers, StreamedOptimizers)
        self._optimizers = optimizers

    def close(self) -> None:
        if self._optimizers is not None:
            self._optimizers.close()
        self._optimizers = None

    def _budget(self) -> int | None:
        budget = self.config.host_budget_gib
        return None if budget is None else int(budget * GIB)

    def _pinned(self, recipe: "Recipe", target: Target) -> int:
        """Host memory of one rank, in bytes."""
        layout = lay_out([self._trained(recipe, target)])
        shared = self.split_on(target.device) != 0
        return pinned_bytes(host_bytes(layout, self.config.bucket_parameters, shared))

    def split_on(self, device: str) -> float | Literal["auto"]:
        """The setting, or what it means on a device."""
        # Beside the main thread's, a second pool of threads slows all small operations down.
        return 0.0 if self.config.split == "auto" and device == "cpu" else self.config.split

    def _trained(self, recipe: "Recipe", target: Target) -> int:
        """Trainable parameters of one rank; indexers are frozen unless a component trains them."""
        counts = count_parameters(recipe.model.build_spec())
        indexers = recipe.components.indexer_training
        if not indexers.enabled:
            total = counts.total - counts.indexer
        else:
            total = counts.indexer if indexers.only else counts.total
        dims = ParallelDims.from_config(recipe.parallelism, target.ranks)
        return total * dims.dp_replicate // target.ranks


def _streamed(trainer: "RecipeTrainer") -> StreamedOptimizers:
    optimizers = trainer.optimizers
    assert isinstance(optimizers, StreamedOptimizers)
    return optimizers
