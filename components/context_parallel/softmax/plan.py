"""Models with softmax attention over context ranks: what layers exchange, and how much."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torchtitan.models.common.attention import BaseAttention

from components.context_parallel.collectives import Link
from components.context_parallel.layout import DEGREE
from components.context_parallel.plan import SplitPlan
from components.context_parallel.refusals import PATH, no_effect, refused
from components.context_parallel.softmax.attend import Exchange, Method
from components.context_parallel.softmax.held import Held
from components.context_parallel.softmax.rings import Rings
from components.context_parallel.softmax.volume import softmax_volume
from components.context_parallel.volume import Volume
from components.core.problems import Problem, divisors, listed_divisors, shown
from components.core.sizes import compute_itemsize
from components.models.titan_attention import TitanAttentionSettings
from components.titan.cp_attention import LayerShape, layer_shapes, share_attention

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.plan import RunPlan

SOFTMAX, WINDOW = "softmax", "window"


@dataclass(frozen=True)
class SoftmaxSplit(SplitPlan):
    """How a recipe whose layers have softmax attention is split over its context ranks.

    Layers with a sliding window are a kind of mixer of their own: they exchange the window.

    Attributes:
        shapes: of all layers, heads being those of one tensor-parallel rank.
        exchange: of the layers without a window.
    """

    shapes: tuple[LayerShape, ...]
    exchange: Exchange

    @staticmethod
    def of(recipe: "Recipe") -> "SoftmaxSplit":
        """``check_softmax`` has found nothing wrong with the recipe."""
        settings, parallel = recipe.components.context_parallel, recipe.parallelism
        shapes, ranks = _shapes(recipe), parallel.context_parallel_degree
        method: Method = (
            usual_softmax(shapes, ranks) if settings.softmax == "auto" else settings.softmax
        )
        exchange = Exchange(method, settings.inner_ring)
        present = dict.fromkeys(_mixer(shape) for shape in shapes)
        return SoftmaxSplit(
            ranks=ranks,
            kind=settings.layout,
            align=1,
            methods={name: WINDOW if name == WINDOW else method for name in present},
            # Tensor ranks share heads here, not tokens.
            tokens=recipe.training.local_batch_size * recipe.training.seq_len // ranks,
            element_size=compute_itemsize(recipe),
            shapes=shapes,
            exchange=exchange,
        )

    def layers(self, mixer: str) -> int:
        """See ``SplitPlan``."""
        return sum(_mixer(shape) == mixer for shape in self.shapes)

    def volume(self, mixer: str) -> Volume:
        """See ``SplitPlan``; where documents are as long as the batch of a rank's group."""
        layout = self.cut((self.tokens * self.ranks,))
        found = [
            softmax_volume(
                self.exchange.of_layer(shape.window), layout, rank, shape.heads,
                self.element_size, shape.window, shape.sinks,
            )
            for shape in self._of(mixer)
            for rank in range(self.ranks)
        ]  # fmt: skip
        return Volume(*(max(sent) for sent in zip(*found, strict=True)))

    def exchanged(self, mixer: str) -> int:
        """See ``SplitPlan``, and ``Held``."""
        return max(self._held(shape) for shape in self._of(mixer))

    def _held(self, shape: LayerShape) -> int:
        parts = len(self.cut((self.tokens * self.ranks,)).held(0))
        held = Held(shape.heads, self.tokens, self.ranks, parts, self.element_size)
        return held.beside(self.exchange.of_layer(shape.window), shape.window)

    def install(self, owner: str, plan: "RunPlan") -> None:
        """See ``SplitPlan``; windows are kept by each layer."""
        change = partial(share_attention, exchange=self.exchange)
        plan.swap(owner, BaseAttention.Config, change)

    def meet(self, link: Link) -> None:
        """Make the groups of both rings, which all ranks must do in the same order."""
        if SOFTMAX in self.methods and self.exchange.method in ("ring", "double_ring"):
            Rings.of(link, self.exchange.inner_ring or link.size)

    def _of(self, mixer: str) -> list[LayerShape]:
        """The different layers with a mixer."""
        return [*dict.fromkeys(shape for shape in self.shapes if _mixer(shape) == mixer)]


def usual_softmax(shapes: tuple[LayerShape, ...], ranks: int) -> Method:
    """Ulysses where ranks can share the heads of all layers, else a ring."""
    shared = all(s.heads.heads % ranks == 0 for s in shapes if s.window is None)
    return "ulysses" if shared else "ring"


def check_softmax(recipe: "Recipe") -> Iterator[Problem]:
    """Problems of the model's attention with its method, and with the run."""
    model, settings = recipe.model, recipe.components.context_parallel
    shapes = _shapes(recipe)
    if not shapes:
        yield Problem(
            f"{PATH}.enabled",
            "true needs a model whose mixers have a method (kda, dsa, softmax attention with "
            f"key heads); this one's layers are split by torchtitan, with {DEGREE} alone",
            f"use another model, or {PATH}.enabled=false",
        )
        return
    assert isinstance(model, TitanAttentionSettings)
    yield from no_effect(settings, "kda", "auto", "this model has no KDA layers")
    yield from _kernels(model)
    if all(shape.window is not None for shape in shapes):
        why = "all layers have sliding windows, which they exchange"
        yield from no_effect(settings, "softmax", "auto", why)
    yield from _methods(recipe, shapes)
    yield from _run(recipe)


def _kernels(model: TitanAttentionSettings) -> Iterator[Problem]:
    # "varlen" is refused over context ranks whoever splits them.
    if model.attention in ("flex", "sdpa"):
        message = f"{model.attention!r} has no effect beside {PATH}, which computes attention"
        yield Problem("model.attention", message, "use auto")
    if model.flex_autotune:
        message = f"true has no effect beside {PATH}, which computes attention"
        yield Problem("model.flex_autotune", message, "use false")


def _methods(recipe: "Recipe", shapes: tuple[LayerShape, ...]) -> Iterator[Problem]:
    settings = recipe.components.context_parallel
    ranks = recipe.parallelism.context_parallel_degree
    if settings.softmax != "double_ring":
        because = f"{PATH}.softmax is {settings.softmax!r}, and double_ring alone has inner rings"
        yield from no_effect(settings, "inner_ring", None, because)
    elif settings.inner_ring is None or settings.inner_ring not in divisors(ranks):
        yield Problem(
            f"{PATH}.inner_ring",
            f"{shown(settings.inner_ring)} does not divide {DEGREE} {ranks} into inner rings",
            f"legal: {listed_divisors(ranks)} (best the ranks of one machine), or "
            f"{PATH}.softmax=ring with {PATH}.inner_ring=null",
        )
    if settings.softmax == "ulysses":
        for heads in dict.fromkeys(s.heads for s in shapes if s.window is None):
            yield from refused(
                partial(Exchange("ulysses").check, heads.heads, heads.key_heads, ranks),
                f"or {PATH}.softmax=ring, which splits no heads",
            )


def _run(recipe: "Recipe") -> Iterator[Problem]:
    backend, compiled = recipe.parallelism.spmd_backend, recipe.compile
    if backend != "spmd_types":
        message = f"{backend!r} beside {PATH}, whose attention takes plain tensors"
        yield Problem("parallelism.spmd_backend", message, "use spmd_types")
    if compiled.enable and "model" in compiled.components:
        message = (
            f"{shown(compiled.components)} beside {PATH}, whose layers talk to other ranks and "
            "are not compiled"
        )
        yield Problem("compile.components", message, "use [loss], or compile.enable=false")


def _shapes(recipe: "Recipe") -> tuple[LayerShape, ...]:
    if not isinstance(recipe.model, TitanAttentionSettings):
        return ()
    tensor_ranks = recipe.parallelism.tensor_parallel_degree
    return layer_shapes(recipe.model.build_spec().model, tensor_ranks)


def _mixer(shape: LayerShape) -> str:
    return SOFTMAX if shape.window is None else WINDOW
