"""One mixer on one rank and over all of them, with the same weights and tokens.

Choose the device (``components.titan.device.use_device``) before importing this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from components.context_parallel.collectives import Link, collect
from components.context_parallel.dsa import choose_pools
from components.context_parallel.glm import alignment
from components.context_parallel.layout import Kind, cut_batch
from components.context_parallel.mixers import DSA_METHODS, KDA_METHODS
from components.context_parallel.share import Share
from components.context_parallel.softmax.attend import Exchange
from components.context_parallel.softmax.kernel import Block, Scores
from components.context_parallel.softmax.volume import Heads, softmax_volume
from components.context_parallel.volume import Volume, dsa_volume, kda_volume
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.fla_kernels import fla_kda, fla_short_conv
from components.models.glm_flash.flops import mixer_flops
from components.models.glm_flash.indexer import PoolSelector
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.mla import SparseMlaCore
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.short_conv import ShortConv
from components.models.glm_flash.sparse_kernels import (
    dense_sparse_mla,
    tilelang_sparse_mla,
    triton_indexer,
)
from components.models.moe import MoEModel
from components.titan.cp_attention import kernel_on, share_attention
from tests.benchmarks.case import Outputs
from tests.benchmarks.cases.sublayer_chunking import given_pools
from tests.benchmarks.context_shapes import Shape
from tests.benchmarks.probes import Device
from tests.swaps import swap_parts

_TARGETS: tuple[tuple[Callable[..., Any], Any], ...] = (
    (fla_kda, KdaCore.Config),
    (fla_short_conv, ShortConv.Config),
    (tilelang_sparse_mla, SparseMlaCore.Config),
    (dense_sparse_mla, SparseMlaCore.Config),
    (triton_indexer, PoolSelector.Config),
)

_SLOWER_DECAY = 4.0
"""Taken from dt_bias, so that states outlive the parts of the gate's documents: else a state that
is lost on its way would not show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to run a mixer."""

    name: str

    run: Callable[[Any, torch.Tensor, Any], torch.Tensor]
    """Module, (n, D) and ``Documents`` of them, or the ``Share`` that they are -> (n, D)."""

    exchange: Any = None
    """What ranks exchange; None: nothing, each computes the whole batch."""

    direct: bool = False
    """Of softmax attention on CUDA: whether backward runs no block's forward again."""

    @property
    def whole(self) -> bool:
        """Whether one rank has all tokens."""
        return self.exchange is None


def variants_of(mixer: str) -> tuple[Variant, ...]:
    """The whole mixer first, with which the others are compared."""
    if mixer == "softmax":
        return tuple(
            Variant(
                name=f"{name}_direct" if direct else name,
                run=partial(_run_softmax, exchange, direct),
                exchange=exchange,
                direct=direct,
            )
            for name, exchange, direct in (
                ("whole", None, False),
                ("ulysses", Exchange("ulysses"), False),
                ("all_gather", Exchange("all_gather"), False),
                ("all_gather", Exchange("all_gather"), True),
                ("ring", Exchange("ring"), False),
                ("ring", Exchange("ring"), True),
                ("double_ring_1", Exchange("double_ring", 1), False),
            )
        )
    methods = {"kda": KDA_METHODS, "dsa": DSA_METHODS}[mixer]
    split = (Variant(name=name, run=run, exchange=name) for name, run in methods.items())
    return (Variant(name="whole", run=_run_whole), *split)


def _run_whole(module: Any, x: torch.Tensor, documents: Documents) -> torch.Tensor:
    return module(x.unsqueeze(0), documents).squeeze(0)


def _run_softmax(
    exchange: Exchange | None, direct: bool, module: Any, x: torch.Tensor, place: Any
) -> Any:
    # Not as a submodule: it has no parameters, and takes turns with others.
    object.__setattr__(module, "inner_attention", module.inner_of[exchange, direct])
    return module(x.unsqueeze(0), place, place.position.unsqueeze(0)).squeeze(0)


class _WholeAttention:
    """All queries over all keys on one rank, by the kernel that parts of them are computed by.

    One for each batch: kernels keep what they make of a batch by this object.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_masks: Documents,
        scale: float | None = None,
        **others: Any,
    ) -> torch.Tensor:
        block = Block(attention_masks.start, 0, 0, q.shape[1], self)
        scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale)
        q, k, v = (t.squeeze(0) for t in (q, k, v))
        return kernel_on(q.device).attend(q, k, v, block, scores)[0].unsqueeze(0)


class Bench:
    """The weights of one mixer, the same on every rank, and one batch at a time.

    Attributes:
        dim: D.
        notes: which kernels run.
        share: this rank's of the batch at hand.
    """

    def __init__(self, shape: Shape, mixer: str, kind: Kind, device: Device, seed: int) -> None:
        self.shape, self.mixer, self._kind, self._device = shape, mixer, kind, device
        self._dtype, self._seed = getattr(torch, shape.dtype), seed
        self._model = GlmFlashModel(**shape.glm)
        self.notes: tuple[str, ...] = ()
        self._config = self._choose()
        self.dim: int = (MoEModel(**shape.moe) if mixer == "softmax" else self._model).dim
        self.module = self._build()
        self.link = Link(dist.group.WORLD)

    def _choose(self) -> Any:
        """The model's own config, with the kernels that a run on this device would choose."""
        if self.mixer == "softmax":
            kernel = kernel_on(torch.device(self._device))
            self.notes = (f"attention kernel: {type(kernel).__name__}",)
            return MoEModel(**self.shape.moe).build_spec().model.layers[0].attention
        layers = self._model.build_spec().model.layers
        config = layers[self._model.layer_types.index(self.mixer)].attention
        chosen = self._model.choose_kernels(self._device, self._dtype.itemsize)
        of_kda = self.mixer == "kda"
        self.notes = tuple(note for note in chosen.notes if note.startswith("KDA") == of_kda)
        for factory, target in _TARGETS:
            if factory in chosen.overrides:
                swap_parts(config, target, factory)
        return config

    def _build(self) -> Any:
        with torch.device(self._device):
            module = self._config.build()
        draw = torch.Generator(self._device).manual_seed(self._seed)
        for owner in module.modules():
            # As in a run: these are float32 in every regime.
            full = isinstance(owner, KdaCore | ShortConv)
            for name, p in owner.named_parameters(recurse=False):
                noise = torch.randn(p.shape, generator=draw, device=self._device)
                scale = p.shape[-1] ** -0.5 if p.dim() == 2 else 0.5
                shift = 1.0 if "norm" in type(owner).__name__.lower() and name == "weight" else 0.0
                shift -= _SLOWER_DECAY if name == "dt_bias" else 0.0
                p.data = (shift + scale * noise).to(torch.float32 if full else self._dtype)
        for name, p in module.named_parameters():
            p.requires_grad_("indexer" not in name)
        if self.mixer == "softmax":
            inner = {
                (v.exchange, v.direct): share_attention(
                    self._config, v.exchange, v.direct
                ).inner_attention.build()
                for v in variants_of("softmax")
                if not v.whole
            }
            object.__setattr__(module, "inner_of", inner)
            del module.inner_attention
        return module

    def take(self, lengths: tuple[int, ...], masked: int | None = None) -> None:
        """Draw a batch of documents of these lengths, the same on every rank, and cut it.

        Args:
            masked: a rank at whose outputs nothing pulls, as where all its labels are ignored.
        """
        align = 4 if self.mixer == "softmax" else alignment(self._model)
        layout = cut_batch(lengths, self.link.size, self._kind, align)
        self.documents = Documents.from_lengths(lengths, self._device)
        self.share = Share(layout, self.documents, self.link)
        if self.mixer == "softmax":
            self.module.inner_of[None, False] = _WholeAttention()
        draw = torch.Generator(self._device).manual_seed(self._seed + 1)
        size = layout.tokens, self.dim
        self._x, self._pull = (
            torch.randn(size, generator=draw, device=self._device).to(self._dtype) for _ in "xp"
        )
        if masked is not None:
            self._pull[layout.order.index(masked, self._pull.device)] = 0
        self._own_x, self._own_pull = self.share.take(self._x), self.share.take(self._pull)

    def input_bytes(self, variant: Variant) -> int:
        """Of the weights, the tokens that a rank has, and their outputs' gradients."""
        x = self._x if variant.whole else self._own_x
        return 2 * x.nbytes + sum(p.nbytes for p in self.module.parameters())

    def step(self, variant: Variant) -> Outputs:
        """Forward and backward: "out", "dx" and the gradient of every weight, of this rank."""
        place: Any = self.documents if variant.whole else self.share
        x, pull = (self._x, self._pull) if variant.whole else (self._own_x, self._own_pull)
        x = x.detach().requires_grad_()
        out = variant.run(self.module, x, place)
        out.backward(pull)
        named = [(f"d{n}", p.grad) for n, p in self.module.named_parameters()]
        self.module.zero_grad(set_to_none=True)
        found = {"out": out.detach(), "dx": x.grad, **dict(named)}
        return {name: value for name, value in found.items() if value is not None}

    def result(self, variant: Variant) -> Outputs:
        """``step`` of the whole batch in float32: rows in its order, gradients summed over ranks.

        The bytes of bringing them together are not counted.
        """
        found = {name: value.float() for name, value in self.step(variant).items()}
        if variant.whole:
            return found
        order, link = self.share.layout.order, Link(self.link.group)
        for name, value in found.items():
            if name in ("out", "dx"):
                found[name] = collect(value, order, link, "result")
            else:
                dist.all_reduce(value, group=self.link.group)
        return found

    @torch.no_grad()
    def other_pools(self) -> float:
        """Share of the pools that the whole batch chooses and a rank does not, of its own queries.

        After it every variant attends to the former: roundings of other shapes of products choose
        others here and there, whose difference would hide that of the attention.
        """
        indexer, module = self.module.indexer, self.module
        wanted = indexer(self._x, module.queries(self._x)[0], self.documents)
        own = choose_pools(indexer, self._own_x, module.queries(self._own_x)[0], self.share)
        count = self.share.layout.tokens
        both = [_membership(pools, count) for pools in (wanted[self.share.index], own)]
        indexer.choose = partial(given_pools, wanted)
        return float((both[0] & ~both[1]).sum() / both[0].sum().clamp(min=1))

    def choose_freely(self) -> None:
        """Undo what ``other_pools`` has fixed."""
        del self.module.indexer.choose

    def volume(self, variant: Variant) -> Volume:
        """What the formulas say that this rank sends in ``step``."""
        if variant.whole:
            return Volume(0, 0)
        layout, rank, e = self.share.layout, self.share.rank, self._dtype.itemsize
        own = {"tokens": layout.tokens_of(rank), "ranks": layout.ranks, "element_size": e}
        model = self._model
        if self.mixer == "kda":
            widths = {"dim": model.dim, "heads": model.kda_heads, "head_dim": model.kda_head_dim}
            return kda_volume(variant.exchange, kind=layout.kind, **own, **widths)
        if self.mixer == "dsa":
            keys = {"index_dim": model.index_head_dim, "pool": model.index_kpool}
            return dsa_volume(kv_rank=model.kv_lora_rank, **own, **keys)
        moe = MoEModel(**self.shape.moe)
        heads = Heads(moe.n_heads, moe.n_kv_heads, moe.head_dim, moe.head_dim)
        return softmax_volume(variant.exchange, layout, rank, heads, e)

    def flops(self) -> float:
        """Of ``step`` for the batch at hand, when it is one document. Backward counts twice, and
        what is not trained is not run backward."""
        tokens = self.share.layout.tokens
        if self.mixer != "softmax":
            trained, frozen = mixer_flops(self._config, tokens)
            return tokens * (3 * trained + frozen)
        moe = MoEModel(**self.shape.moe)
        products = 2 * sum(p.numel() for p in self.module.parameters() if p.dim() == 2)
        return 3 * tokens * (products + 4 * moe.n_heads * moe.head_dim * (tokens + 1) / 2)


def _membership(pools: torch.Tensor, count: int) -> torch.Tensor:
    """int (n, chosen), -1 for none -> bool (n, count): which pools a query has chosen."""
    found = torch.zeros(len(pools), count + 1, dtype=torch.bool, device=pools.device)
    return found.scatter_(1, pools.long() + 1, True)[:, 1:]
