"""torchtitan's trainer, subclassed where a recipe needs something it does not have."""

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.trainer import Trainer

from components.core.base import Component, Inputs
from components.titan.checkpoint import RunCheckpoints
from components.titan.debug import DebugSettings
from components.titan.expert_load import ExpertLoad
from components.titan.memory.watcher import Watcher, watchers
from components.titan.metrics import RunMetrics
from components.titan.stop import StopRequest
from components.titan.story import narrate
from data.loader import PackedLoader


class RecipeTrainer(Trainer):
    """``torchtitan.Trainer`` plus: components' hooks, stop on a signal, random numbers by step.

    Attributes:
        stopped_by: signal number that ended training early, or None.
        host_group: all ranks, for what must not wait for the device; None for one rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        checkpoint: RunCheckpoints.Config = field(default_factory=RunCheckpoints.Config)
        metrics: RunMetrics.Config = field(default_factory=RunMetrics.Config)
        debug: DebugSettings = field(default_factory=DebugSettings)

    metrics_processor: RunMetrics
    checkpointer: RunCheckpoints
    _watchers: Sequence[Watcher] = ()

    def __init__(
        self, config: Config, *, enabled: list[Component], expert_load: ExpertLoad
    ) -> None:
        super().__init__(config)
        self.host_group = _host_group(config.comm.init_timeout_seconds)
        self._agree_on_data()
        self.enabled = enabled
        self.stopped_by: int | None = None
        self._stop = StopRequest(self.host_group)
        self.metrics_processor.total_steps = config.training.steps
        self.metrics_processor.sources.append(partial(self._report_load, expert_load))
        for component in enabled:
            self.metrics_processor.glossary.update(component.scalars)
            self.metrics_processor.headlines.update(component.headlines)
            self.metrics_processor.sources.append(partial(component.metrics, self))
            self.checkpointer.before_save.append(partial(component.before_save, self))
            component.on_built(self)
        self._watchers = watchers(self)

    def train(self) -> None:
        """Train until the last step, the end of the data, or a signal."""
        self._stop.install()
        try:
            super().train()
        finally:
            self._stop.uninstall()

    def save_seed(self) -> None:
        """Save the freshly initialised model as step 0: the common start of runs on other meshes.

        On a CPU every rank draws the same numbers for its shard, so runs on different numbers of
        ranks start equal only from such a checkpoint (`checkpoint.initial_load_path`).
        """
        # Moments are made by an update with gradients of zero, which counts as one.
        self.optimizers.state_dict()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                state["step"].zero_()
        self.checkpointer.save(curr_step=0, last_step=True)

    def train_step(self, data_iterator: Any) -> None:
        self._seed_step()
        with contextlib.ExitStack() as watched:
            for watcher in self._watchers:
                watched.enter_context(watcher.step())
            for component in self.enabled:
                component.before_step(self)
            super().train_step(data_iterator)
            for component in self.enabled:
                component.after_step(self)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        for component in self.enabled:
            component.before_microbatch(self)
        with contextlib.ExitStack() as watched:
            for watcher in self._watchers:
                watched.enter_context(watcher.microbatch())
            # Detached: the graph, and what it still holds, ends here and not with the next pass.
            loss = super().forward_backward_step(**batch).detach()
            # Watched as well: what components hold for the micro-batch is let go here.
            for component in self.enabled:
                component.after_microbatch(self)
        return loss

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> Inputs:
        inputs = super().post_dataloading_process(input_dict, labels)
        for component in self.enabled:
            inputs = component.prepare_inputs(self, inputs)
        return inputs

    def close(self) -> None:
        for component in getattr(self, "enabled", []):
            component.close()
        super().close()

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if not self._stop.agreed():
            return True
        self.stopped_by = self._stop.signal
        if self.step > 0:
            self.checkpointer.save_now(self.step)
        name = signal.Signals(self.stopped_by or 0).name
        narrate(f"stopped by {name} after step {self.step}")
        return False

    def state_dict(self) -> dict[str, Any]:
        """Step and tokens seen by all ranks, so that another number of ranks can go on counting."""
        state = super().state_dict()
        return {**state, "ntokens_seen": state["ntokens_seen"] * self._counting_ranks()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tokens = state_dict["ntokens_seen"] // self._counting_ranks()
        super().load_state_dict({**state_dict, "ntokens_seen": tokens})

    def _report_load(self, load: ExpertLoad) -> dict[str, float]:
        totals = load.totals()
        self.metrics_processor.record_expert_load(self.step, totals)
        return load.metrics(totals)

    def _counting_ranks(self) -> int:
        """Ranks that read tokens of their own; each counts what it read."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        return mesh.size() if mesh is not None else 1

    def _agree_on_data(self) -> None:
        """Refuse to train on corpora that differ between machines.

        Raises:
            ValueError: ranks tokenised different documents; every group of ranks is named.
        """
        if self.host_group is None or not isinstance(self.dataloader, PackedLoader):
            return
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, self.dataloader.store.digest, group=self.host_group)
        refuse_different_corpora(digests)

    def _seed_step(self) -> None:
        """Make random numbers a function of (seed, step, data rank).

        A resumed run then draws what the uninterrupted run drew, on any number of ranks, without
        generator states in the checkpoint. Ranks that share tokens share the numbers.
        """
        seed = self.config.debug.seed
        if seed is None:
            return
        rank = 0
        if self.parallel_dims.dp_enabled:
            rank = self.parallel_dims.get_mesh("batch").get_local_rank()
        torch.manual_seed(_mix(seed, self.step, rank))


def _host_group(timeout_seconds: int) -> dist.ProcessGroup | None:
    """A gloo group over all ranks, for what must not wait for the device; None for one rank."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def refuse_different_corpora(digests: list[str]) -> None:
    """Compare the ranks' corpus digests; see ``RecipeTrainer._agree_on_data``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks_of.setdefault(digest, []).append(rank)
    if len(ranks_of) > 1:
        groups = "; ".join(f"ranks {ranks} read {digest}" for digest, ranks in ranks_of.items())
        raise ValueError(
            f"data: the ranks read different documents ({groups}); give every machine the same "
            "files (and Python version, for data=stdlib)"
        )


def _mix(*values: int) -> int:
    """Combine small integers into one well-spread 63-bit seed (multiply-xor, as in SplitMix64)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
