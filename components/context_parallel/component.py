"""One sequence over several ranks: packed documents are cut, and mixers exchange what they need."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from components.context_parallel.checks import check_split
from components.context_parallel.collectives import Link, Traffic
from components.context_parallel.families import alignment_of, split_of
from components.context_parallel.layout import Kind, most_above_mean
from components.context_parallel.plan import SplitPlan
from components.context_parallel.share import Share
from components.core.base import Component, MemoryTerm, Target
from components.core.problems import Problem
from components.models.glm_flash.documents import Documents
from components.titan.context_parallel import Batch, batches_cut_by
from components.titan.plan import RunPlan
from components.titan.story import narrate

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer

_MIB = 2**20
_DIRECTIONS = ("forward", "backward")
_LAYERS = {
    "kda": "KDA layer",
    "dsa": "layer of sparse attention",
    "softmax": "layer of softmax attention without a window",
    "window": "layer with a sliding window",
}


class ContextParallel(Component):
    """Each of ``parallelism.context_parallel_degree`` ranks computes a share of every batch.

    Documents of a batch are cut over the ranks, in GLM-5.3-Flash where pools of tokens end; nothing
    is padded, and shares differ by a few tokens at most. Loss and gradients are those of one
    process, up to the rounding of sums. Everything but the mixers works on the share as on a batch.
    KDA layers exchange hidden states (each rank computes its heads for all tokens), projections, or
    states of documents that were cut; sparse attention gathers latents and the indexer's pooled
    keys. Softmax attention trades tokens for heads, gathers keys and values, or lets them go round
    in one ring or in two; its layers with a sliding window exchange the window. Of keys and values
    only those of documents that go on in a later part travel.
    """

    name = "context_parallel"
    summary = (
        "documents of a batch cut over ranks; KDA exchanges states, sparse attention latents, "
        "softmax attention heads or keys"
    )
    source = (
        "DeepSpeed Ulysses, arXiv 2309.14509 (heads); states as flash-linear-attention passes "
        "them; gathered latents as prime-rl gathers them; ring attention, arXiv 2310.01889, and "
        "LoongTrain's double ring, arXiv 2406.18485"
    )
    scalars = {
        f"context/{mixer}_{direction}_mib": (
            f"sent by one {layer} in {direction} in the step, all passes, first rank, MiB"
        )
        for mixer, layer in _LAYERS.items()
        for direction in ("forward", "backward")
    }

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        kda: Literal["auto", "hidden", "projections", "state"] = "auto"
        """What KDA layers exchange. hidden: ranks gather the mixer's input and compute their heads;
        bytes grow with ranks and tokens. projections: queries, keys, values and gates instead;
        less memory, and at the published widths fewer bytes from 6 ranks on. state: what documents
        that were cut leave behind, whatever their length; a cut document runs three times more.
        auto: hidden for up to 4 ranks that divide the heads, else state."""

        dsa: Literal["gathered"] = "gathered"
        """What sparse attention exchanges. gathered: latents and pooled index keys of all tokens;
        queries stay."""

        softmax: Literal["auto", "ulysses", "all_gather", "ring", "double_ring"] = "auto"
        """What softmax attention without a sliding window exchanges. ulysses: tokens for heads,
        which the ranks must divide; key heads fewer than ranks are sent in copies. all_gather:
        every rank gets all keys and values. ring: they go round while attention is computed; a rank
        holds three ranks' at most. double_ring: in inner rings and at the same time between them; a
        rank holds five ranks' at most. auto: ulysses where ranks divide the heads, else ring."""

        inner_ring: int | None = None
        """Consecutive ranks of an inner ring of double_ring, a divisor of the context ranks: those
        of one machine. null with the other methods."""

        layout: Kind = "zigzag"
        """How a batch is cut. zigzag: two parts per rank, an early and a late one, so that the
        attention of early tokens, which see little, balances that of late ones. contiguous: one
        part; half the cuts, and half the states that KDA passes on."""

        def most_above_mean(self, model: Any) -> int:
            """Tokens that a rank may have more than the others on average, at most."""
            return most_above_mean(self.layout, alignment_of(model))

    config: Config
    plan: SplitPlan
    """Of the run that this component has been applied to."""
    link: Link
    """To the other context ranks, once the trainer stands."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._open = ExitStack()

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        yield from check_split(recipe, target)

    def apply(self, plan: RunPlan) -> None:
        self.plan = split_of(plan.recipe)
        self.plan.install(self.name, plan)

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What a layer holds of other ranks' tokens while it runs."""
        split = split_of(recipe)
        most = max(split.methods, key=split.exchanged)
        name = f"what a {most} layer exchanges with context ranks, while it runs"
        return [MemoryTerm(name, split.exchanged(most), note="at most")]

    def traffic(self, recipe: "Recipe", target: Target) -> list[str]:
        split = split_of(recipe)
        lines = []
        for mixer, method in split.methods.items():
            forward, backward = split.volume(mixer)
            lines.append(
                f"{_named(mixer, method)}: {forward / _MIB:,.1f} MiB forward and "
                f"{backward / _MIB:,.1f} backward, per rank, layer and pass; "
                f"{split.layers(mixer)} layers, context {split.ranks}, {split.kind}"
            )
        return lines

    def on_built(self, trainer: "RecipeTrainer") -> None:
        """From here on batches are cut."""
        self.link = Link(trainer.parallel_dims.get_mesh("cp").get_group(), Traffic())
        self.plan.meet(self.link)
        self._open.enter_context(batches_cut_by(self.cut))
        methods = ", ".join(_named(*chosen) for chosen in self.plan.methods.items())
        narrate(f"context parallelism: {self.plan.ranks} ranks, {self.plan.kind}, {methods}")

    def cut(self, tokens: torch.Tensor, labels: torch.Tensor, extra: dict[str, Any]) -> Batch:
        """This rank's share of a batch that all context ranks hold.

        Args:
            tokens: int64 (B, L).
            labels: int64 (B, L).
            extra: "positions", integers (B, L), and nothing else that has a row per token.

        Returns:
            The same of the share, (1, n) each; the share itself as "attention_masks".
        """
        documents = Documents.from_positions(extra["positions"])
        share = Share(self.plan.cut(documents.lengths), documents, self.link)
        tokens, labels, positions = (
            share.take(rows.flatten()).unsqueeze(0) for rows in (tokens, labels, extra["positions"])
        )
        return tokens, labels, {**extra, "positions": positions, "attention_masks": share}

    def before_step(self, trainer: "RecipeTrainer") -> None:
        self.link.traffic.reset()

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        """Counted bytes, without those of validation: it comes after a step's line."""
        found = {f"context/{m}_{d}_mib": 0.0 for m in self.plan.methods for d in _DIRECTIONS}
        for (name, direction), count in self.link.traffic.sent.items():
            mixer = name.partition(".")[0]
            found[f"context/{mixer}_{direction}_mib"] += count / self.plan.layers(mixer) / _MIB
        return found

    def close(self) -> None:
        self._open.close()


def _named(mixer: str, method: str) -> str:
    """Both, where there is a choice."""
    return mixer if method == mixer else f"{mixer} {method}"
