"""A typed recipe becomes torchtitan's ``Trainer.Config``: the only translation in the project."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.validate import Validator

from components.core.base import Component
from components.core.recipe import Recipe
from components.core.registry import enabled_components
from components.core.sizes import compute_itemsize
from components.titan import dispatch
from components.titan.expert_load import ExpertLoad
from components.titan.plan import ParallelizeFn, RunPlan
from components.titan.routing_profile import follow_profile
from components.titan.tokenizer import tokenizer_config
from components.titan.trainer import RecipeTrainer
from data.loader import PackedLoader


@dataclasses.dataclass
class Run:
    """A run ready to be built on this rank.

    Attributes:
        config: torchtitan's configuration with every component applied.
        enabled: the components that are on.
        notes: choices made for the user ("attention: sdpa (auto on cpu)"), to be logged once.
    """

    config: RecipeTrainer.Config
    enabled: list[Component]
    notes: list[str]
    expert_load: ExpertLoad

    def build(self) -> RecipeTrainer:
        """Build the trainer; the process group's environment variables must be set.

        Where that fails, the components are closed: they may hold host memory already.
        """
        with contextlib.ExitStack() as on_failure:
            for component in self.enabled:
                on_failure.callback(component.close)
            trainer = self.config.build(enabled=self.enabled, expert_load=self.expert_load)
            on_failure.pop_all()
        return trainer

    @contextlib.contextmanager
    def build_and_close(self) -> Iterator[RecipeTrainer]:
        """Build the trainer and release what it holds, the process group included."""
        trainer = self.build()
        try:
            yield trainer
        finally:
            trainer.close()
        # After a failure the group is left to the end of the process: other ranks may hang in it.
        if dist.is_initialized():
            dist.destroy_process_group()


def prepare(recipe: Recipe, run_dir: Path, device: str, world_size: int) -> Run:
    """Translate a recipe and let its components change the run.

    Args:
        recipe: bound and checked.
        run_dir: everything the run writes goes below it.
        device: "cpu" or "cuda".
        world_size: ranks in the job.

    Raises:
        ValueError: two components claim the same seam, or one matches nothing; or the model has no
            kernels for this device.
    """
    # Components may edit what they are given; the recipe on record must stay what the user wrote.
    recipe = copy.deepcopy(recipe)
    kernels = recipe.model.on_one_rank(recipe).choose_kernels(device, compute_itemsize(recipe))
    config = _stock_config(recipe, run_dir)
    plan = RunPlan(recipe, config, device, world_size)
    for factory in kernels.overrides:
        plan.default_override(factory)
    expert_load = ExpertLoad()
    plan.after_optimizer(expert_load.attach, first=True)
    enabled = enabled_components(recipe.components)
    for component in enabled:
        component.apply(plan)
    if device == "cpu":
        # Outermost, so that modules which components shard are made safe as well.
        _make_gloo_safe(plan)
    idle = plan.finish()
    # Kernels of parts that components have replaced altogether are none of the run's.
    notes = () if kernels.overrides and idle.issuperset(kernels.overrides) else kernels.notes
    names = ", ".join(component.name for component in enabled) or "none"
    type(config).__post_init__(config)
    return Run(config, enabled, [*notes, f"components: {names}"], expert_load)


def _stock_config(recipe: Recipe, run_dir: Path) -> RecipeTrainer.Config:
    """torchtitan's configuration with every technique off. ``recipe`` is the run's own copy."""
    tokenizer, tokenizer_path = tokenizer_config(recipe.data.tokenizer)
    spec = recipe.model.build_spec()
    if recipe.debug.profile is not None:
        follow_profile(spec.model, recipe.debug.profile)
        # What routers ask whether they are free to choose.
        recipe.debug.moe_force_load_balance = True
    return RecipeTrainer.Config(
        model_spec=spec,
        hf_assets_path=tokenizer_path,
        dump_folder=str(run_dir),
        profiler=recipe.profiler,
        metrics=recipe.metrics,
        tokenizer=tokenizer,
        dataloader=PackedLoader.Config(corpus=recipe.data, split="train"),
        optimizer=recipe.optimizer.container(),
        lr_scheduler=recipe.lr_scheduler,
        training=recipe.training,
        parallelism=recipe.parallelism,
        checkpoint=recipe.checkpoint,
        activation_checkpoint=None,
        compile=recipe.compile,
        comm=recipe.comm,
        validator=_validator(recipe),
        debug=recipe.debug,
        # The size is needed where tensor parallelism shards the vocabulary.
        loss=CrossEntropyLoss.Config(global_vocab_size=recipe.model.vocab_size),
    )


def _validator(recipe: Recipe) -> Validator.Config:
    parallel = recipe.parallelism
    pipelined = parallel.pipeline_parallel_degree > 1
    size = parallel.pipeline_parallel_microbatch_size
    return Validator.Config(
        enable=recipe.validation.enabled,
        freq=recipe.validation.every,
        steps=recipe.validation.batches,
        dataloader=PackedLoader.Config(
            corpus=recipe.data,
            split="validation",
            infinite=False,
            # A pipelined step takes several batches; a pass must not end in the middle of one.
            batches_multiple=recipe.training.local_batch_size // size if pipelined else 1,
        ),
    )


def _make_gloo_safe(plan: RunPlan) -> None:
    """gloo knows neither FSDP's scaled sums nor the list form of all-to-all."""
    plan.wrap_parallelize(_force_sum_reduction)
    if plan.recipe.parallelism.expert_parallel_degree > 1:
        plan.default_override(dispatch.gloo)


def _force_sum_reduction(parallelize: ParallelizeFn) -> Callable[..., nn.Module]:
    def parallelize_for_gloo(model: nn.Module, **kwargs: Any) -> nn.Module:
        model = parallelize(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize_for_gloo
