"""Score the pools of sparse attention in fp8."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from components.core.base import Component, MemoryTerm, Target
from components.core.modules import modules_of
from components.core.problems import Problem
from components.core.sizes import FLOAT32, compute_itemsize, mixed_tokens
from components.models.glm_flash.fp8_selector import Fp8Selector
from components.models.glm_flash.indexer import PoolSelector
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.sparse_kernels import choose_indexer
from components.models.glm_flash.with_indexer import has_indexer, no_indexer
from components.titan.plan import RunPlan
from kernels.backends import machine
from kernels.backends.registry import REFERENCE

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer


class IndexerFp8(Component):
    """Queries and keys of the indexers are rounded to e4m3, each row by a factor of its own.

    Scores are sums in float32 as before, and the choice among them is exact; but the 512 best of
    rounded scores are not all the 512 best. So some queries choose in full precision too, and a
    run ends where fp8 finds too few of their pools.
    """

    name = "indexer_fp8"
    summary = "indexers score in fp8, for time; ends the run if too few pools are the exact ones"
    source = (
        "DeepSeek-V3.2, arXiv 2512.02556, section 2.1 (an indexer in FP8) and its inference code"
    )
    scalars = {
        "indexer/fp8_recall": "pools that full precision chooses and fp8 too, as a share, of the "
        "layer with the fewest; over the queries compared in a step"
    }
    headlines = {"indexer/fp8_recall": "fp8 recall"}
    changes_training = True
    watches = ("min_recall", "compared")

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        min_recall: float = 0.9
        """The run ends where a layer's recall is below, at steps that are logged. Between 0 and 1;
        0 ends none. Random numbers have about 0.957."""

        rotate: bool = True
        """Turn queries and keys by a Hadamard matrix before they are rounded, so that a channel
        that stands out does not set the factor of all. Needs a model.index_head_dim that is a power
        of two."""

        compared: int = 128
        """Queries per layer, rank and piece of a batch that choose in full precision too, evenly
        spaced; at least 1. Of few the share is left to chance."""

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        model, settings = recipe.model, self.config
        if not has_indexer(model):
            yield no_indexer(self.path)
            return
        if not 0 <= settings.min_recall <= 1:
            yield Problem(
                f"{self.path}.min_recall", f"{settings.min_recall} is no share", "use 0 to 1"
            )
        if settings.compared < 1:
            yield Problem(
                f"{self.path}.compared",
                f"{settings.compared} queries leave nothing to compare",
                "use 1 or more",
            )
        width = model.index_head_dim
        if settings.rotate and width & (width - 1):
            yield Problem(
                f"{self.path}.rotate",
                f"true needs a model.index_head_dim that is a power of two, and it is {width}",
                f"use {self.path}.rotate=false",
            )
        yield from self._machine(model, recipe, target)

    def _machine(self, model: GlmFlashModel, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        if target.device != "cuda":
            return
        choice = choose_indexer(model, target.device, compute_itemsize(recipe))
        if choice.backend == REFERENCE:
            yield Problem(
                f"{self.path}.enabled",
                f"true gains nothing: {choice.note}, which multiplies in float32",
                f"use a model.indexer_kernel that runs, or {self.path}.enabled=false",
            )
        elif reason := machine.why_not("triton", target.device, machine.ADA_ON, {}):
            yield Problem(
                f"{self.path}.enabled",
                f"true cannot run here: {reason}",
                f"use {self.path}.enabled=false",
            )

    def apply(self, plan: RunPlan) -> None:
        def in_fp8(config: PoolSelector.Config) -> Fp8Selector.Config:
            return Fp8Selector.Config(
                inner=config,
                count=config.topk // config.kpool,
                kpool=config.kpool,
                scale=config.scale,
                rotate=self.config.rotate,
                compared=self.config.compared,
            )

        plan.swap(self.name, PoolSelector.Config, in_fp8)

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """Rounded operands with their factors, while a layer chooses."""
        model = recipe.model
        assert isinstance(model, GlmFlashModel)
        of_head = model.index_head_dim + 2 * FLOAT32  # factors, and weights times factors
        keys = (model.index_head_dim + FLOAT32) // model.index_kpool
        nbytes = mixed_tokens(recipe) * (model.index_n_heads * of_head + keys)
        return [MemoryTerm("queries and keys of one layer's indexer in fp8", nbytes)]

    def before_step(self, trainer: "RecipeTrainer") -> None:
        for selector in modules_of(trainer.model_parts, Fp8Selector):
            selector.reset()

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        """Collective over the ranks that share a loss.

        Raises:
            RuntimeError: a layer's recall is below ``min_recall``, on every rank.
        """
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        selectors = modules_of(trainer.model_parts, Fp8Selector)
        group = None if mesh is None else mesh.get_group()
        shares = recalls(selectors, trainer.device, group)
        if not shares:
            return {}
        least = min(shares, key=lambda layer: shares[layer])
        if shares[least] < self.config.min_recall:
            raise RuntimeError(
                f"{self.path}.min_recall: {self.config.min_recall}, and in step {trainer.step} fp8 "
                f"chose {_below(shares[least])} of the pools that full precision chooses in sparse "
                f"layer {least} of {len(selectors)}; legal: a min_recall up to that, to continue "
                f"this run; rotate=true where it is off, or {self.path}.enabled=false, for another"
            )
        return {"indexer/fp8_recall": shares[least]}


def recalls(
    selectors: list[Fp8Selector], device: torch.device, group: dist.ProcessGroup | None
) -> dict[int, float]:
    """Each sparse layer's recall since its reset, over all ranks of ``group``; those with nothing
    to compare are left out. Collective where there is a group, and waits for the device."""
    if not selectors:
        return {}
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    counts = [nothing if n is None else n for s in selectors for n in (s.found, s.wanted)]
    total = torch.stack(counts)
    if group is not None:
        dist.all_reduce(total, group=group)
    pairs = enumerate(total.view(-1, 2).tolist())
    return {layer: found / wanted for layer, (found, wanted) in pairs if wanted}


def _below(share: float) -> str:
    """Four places that are legal themselves: cut, not rounded."""
    return f"{math.floor(share * 10_000) / 10_000:.4f}"
