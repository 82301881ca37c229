"""What one layer needs while it is recomputed and differentiated, by arithmetic; an upper bound.

Parts run backward from last to first, and what a part kept is gone when the one before it begins.
So the bound is the largest, over the parts, of: what it and the parts before it keep
(``saved_bytes``), its temporary tensors, gradients of the residual streams, and gradients of mHC's
weights and logits (4m). Gradients of the streams are one tensor behind a mixer or a feed-forward
part, and two while a site writes (what arrives, what leaves) or reads (one is added to the other).
The layer's own input waits between layers and is not counted. Symbols are those of ``saved_bytes``;
temporary tensors per token while a part runs backward:

* mHC, reading: the Sinkhorn iteration, 8s(n^2 + n). Off: four float32 copies of the streams, 16nD.
* mHC, writing: De. Off: two products of the streams' size, 2nDe, more.
* mHC in kernels: gradients of logits and maps, 4(2m + 2n + 1), and 16 partial sums of the weights'
  gradient in float32, 64mnD in all.
* All trimmed sites: 8 float32 tensors of one block of rows (``kernels.row_blocks``), at one time.
* KDA: gradients of the core's inputs and of the convolutions' (9Qe) and of x. The reference holds
  1,024 tokens' matrices besides: 40 float32 numbers per token and channel and six states per 16
  tokens. fla holds 28Q + 7Qe + Qde/32 + 512H, from reading fla-core 0.6.0: G; w, u, qg, kg, v_new,
  dv twice; h and dh; dq, dk, dg twice and dg's sums in float32; dA twice. With its inputs, outputs
  and what it keeps that is 72.0 GiB for 64 heads and 131,072 tokens, where 72.3 were measured.
* DSA: gradients of queries, outputs and latents; latents and their gradient in float32; the maps to
  keys and values and their gradients in float32; and by ``model.sparse_mla_kernel``: "torch", two
  chunks of queries (``kernels.dsa.absorbed``); "tilelang", one of ``model.sparse_mla_chunk``, the
  latents in the compute dtype and their gradient in float32, in a piece also latent outputs and
  LSE, hre + 4h; "dense", one such chunk, and keys and values of ``heads_together`` with their
  gradients, h (d_q + d_v) (2e + 4).
* SwiGLU: as many gradients as tensors were kept.
* MoE: beyond what was kept, the most of: the shared experts' SwiGLU; gradients of outputs KDe; of
  activations KIe; and, with outputs, activations, gate and up gone again, gradients of gate and up
  and three times those of the experts' inputs while they are summed, 2KDe - KIe. Off: products of
  the combine and their gradients, 8KD; the router's copies, 8D; a SwiGLU's three gradients more.

Not included: gradients of parameters, gathered parameters and what exchanges between ranks hold,
all of which depend on the sharding; with expert parallelism ranks are taken to get as many rows as
they send; the loss that ``components.indexer_training`` adds, which has a term of its own.

Of several tensor ranks one holds its part of the tokens in mHC, norms and, with expert parallelism,
routed experts; mixers and SwiGLUs are narrower (``part_of_rank``) and run for all tokens.

A part that ``components.sublayer_chunking`` cuts keeps its input and, per piece, a state (KDA) or
pool numbers (DSA); what it would keep and need besides is that of one piece. Under
``components.layer_recompute`` its output, states and pools are counted there as well. Routed
experts that run again in backward (``components.sequence_chunked_moe``, ``llep``,
``pipelined_llep``) keep their tokens, weights and expert ids, and need besides what one chunk keeps
and needs, and the gradients of all tokens, beside those of the shared experts. With a plan a rank
computes as many rows more than it sends as the plan lets it; a chunk on its way adds its tokens and
gradients of outputs, 2KDe. Shared experts in pieces keep nothing: their input is the routed ones'.
With ``sublayer_chunking.streams`` those between mixer and feed-forward part, nDe, are not kept.
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from components.core.sizes import FLOAT32, compute_itemsize, local_tokens, mixed_tokens
from components.expert_dispatch.cut import cut_of
from components.models.glm_flash.fused_connections import choose_hyper_connections
from components.models.glm_flash.saved_bytes import (
    Form,
    boundary_bytes,
    dispatched_bytes,
    is_dense,
    moe_bytes_in_chunks,
    saved_bytes,
    shared_bytes,
)
from components.models.glm_flash.sparse_kernels import choose_sparse_mla
from components.models.glm_flash.tensor_parallel import part_of_rank
from kernels import row_blocks
from kernels.backends.registry import REFERENCE
from kernels.dsa import absorbed, dense
from kernels.hyper_connections import fused
from kernels.kda.chunked import SEGMENT
from kernels.kda.chunks import CHUNK

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.models.glm_flash.settings import GlmFlashModel


def form_of(model: "GlmFlashModel", recipe: "Recipe", device: str) -> Form:
    """How a recipe computes the model's layers on "cpu" or "cuda"."""
    trimming = recipe.components.precision_trimming
    sites = (field.name for field in fields(trimming) if field.name != "enabled")
    # A switch that is not set is on.
    wanted = frozenset(s for s in sites if trimming.enabled and getattr(trimming, s) is not False)
    cuda, itemsize = device == "cuda", compute_itemsize(recipe)
    attention: str = model.sparse_mla_kernel
    if attention == "auto":
        attention = choose_sparse_mla(model, device, itemsize).backend
    streams: str = model.hyper_connections_kernel
    if streams == "auto":
        streams = choose_hyper_connections(model, device, itemsize).backend
    return Form(
        itemsize=itemsize,
        sparse_mla=attention,
        trimmed=wanted,
        fla=model.kda_kernel == "fla" or (model.kda_kernel == "auto" and cuda),
        fused_norm=cuda,
        fused_streams=streams != REFERENCE,
    )


def layer_bytes(model: "GlmFlashModel", recipe: "Recipe", device: str) -> list[int]:
    """What each layer keeps for backward without recomputation, its input included."""
    return [_Layer(model, index, recipe, device).kept() for index in range(model.n_layers)]


def working_sets(model: "GlmFlashModel", recipe: "Recipe", device: str) -> list[int]:
    """What each layer needs, at most, while it is recomputed and differentiated, without its
    input."""
    return [_Layer(model, index, recipe, device).working() for index in range(model.n_layers)]


class _Layer:
    """Of several tensor ranks: ``model`` and ``tokens`` as the residual streams see them."""

    def __init__(
        self,
        model: "GlmFlashModel",
        index: int,
        recipe: "Recipe",
        device: str,
        tokens: int | None = None,
    ) -> None:
        self.model, self.index = model, index
        self.form = form_of(model, recipe, device)
        self.tokens = tokens or local_tokens(recipe)
        self.mixing = self
        if tokens is None and recipe.parallelism.tensor_parallel_degree > 1:
            part, mixed = part_of_rank(model, recipe), mixed_tokens(recipe)
            self.mixing = _Layer(part, index, recipe, device, mixed)
        self.spread = recipe.parallelism.expert_parallel_degree > 1
        self.kda = model.layer_types[index] == "kda"
        self.dense = is_dense(model, index)
        chunking = recipe.components.sublayer_chunking
        self.piece = min(chunking.chunk_tokens, self.tokens)
        self.experts = cut_of(recipe)
        self.cut = {
            "moe": self.experts is not None,
            "attention": chunking.enabled and (chunking.kda if self.kda else chunking.dsa),
            "feed_forward": chunking.enabled and chunking.feed_forward,
        }
        self.cut_shared = chunking.enabled and chunking.shared_expert
        self.rebuilt = chunking.enabled and chunking.streams

    def kept(self) -> int:
        return sum(self._parts().values())

    def working(self) -> int:
        parts = self._parts()
        writing = parts.pop("writes") // 2
        boundary = boundary_bytes(self.model, self.tokens, self.form)
        kept, most = -boundary, 0
        for part, size in parts.items():
            kept += size
            gradients = 2 if part.endswith("_hc") else 1
            # Kernels that read streams again take them whole.
            gradients += part == "ffn_hc" and self._fused_again()
            needed = self._seeing(part)._needed(part) + 2 * self._gathered(part)
            most = max(most, kept + needed + gradients * boundary + self._blocks())
            if part in ("attention", "feed_forward", "moe"):
                kept += writing
                pieces = self._pieces_of_merge(again=self.rebuilt and part != "attention")
                needed = self._temporary("writes", self.tokens) + pieces
                most = max(most, kept + needed + 2 * boundary)
        n = self.model.hc_mult
        small = self.tokens * FLOAT32 * (n * n + 2 * n)
        return most + small

    def _fused_again(self) -> bool:
        return self.rebuilt and self.form.fused_streams

    def _pieces_of_merge(self, again: bool) -> int:
        """Temporary tensors of some tokens, while the gradient of what they merge is taken."""
        if not self.form.fused_streams:
            return self._blocks()
        if not again:
            return 0
        # Streams, and the gradients of both parts before they are in their places.
        model = self.model
        rows = min(self.tokens, fused.AGAIN // (model.hc_mult * model.dim))
        return rows * (2 * model.hc_mult + 1) * model.dim * self.form.itemsize

    def _parts(self) -> dict[str, int]:
        """What each part keeps, first to last."""
        names = saved_bytes(self.model, self.index, self.tokens, self.form)
        return {name: self._seeing(name)._kept(name) + self._gathered(name) for name in names}

    def _kept(self, part: str) -> int:
        if self._is_cut(part):
            size = self._kept_when_cut(part)
        else:
            size = saved_bytes(self.model, self.index, self.tokens, self.form)[part]
        if self.rebuilt and part == "ffn_hc":
            size -= boundary_bytes(self.model, self.tokens, self.form)
        if self.cut_shared and part == "moe":
            size -= shared_bytes(self.model, self.tokens, self.form)
        return size

    def _seeing(self, part: str) -> "_Layer":
        """The layer as a part sees it."""
        mixing = part in ("attention", "feed_forward") or (part == "moe" and not self.spread)
        return self.mixing if mixing else self

    def _gathered(self, part: str) -> int:
        """Tokens of all tensor ranks, for a shared expert whose inner width they divide."""
        shared = part == "moe" and self.spread and self.model.n_shared_experts
        if not shared or self.mixing is self:
            return 0
        return self.mixing.tokens * self.model.dim * self.form.itemsize

    def _needed(self, part: str) -> int:
        """Temporary tensors of a part; of one that is cut, with what a piece keeps."""
        if not self._is_cut(part):
            return self._temporary(part, self.tokens)
        if part == "moe":
            return self._needed_by_cut_moe()
        of_piece = saved_bytes(self.model, self.index, self.piece, self.form)[part]
        gradients = 2 * self.tokens * self.model.dim * self.form.itemsize
        sparse = part == "attention" and not self.kda
        latents = self._latents() + self._kept_by_kernel() if sparse else 0
        return of_piece + self._temporary(part, self.piece) + gradients + latents

    def _is_cut(self, part: str) -> bool:
        return self.cut.get(part, False)

    def _kept_when_cut(self, part: str) -> int:
        model, rows = self.model, self.tokens * self.model.dim * self.form.itemsize
        if part == "moe":
            return moe_bytes_in_chunks(model, self.tokens, self.form)
        if part == "feed_forward":
            return rows
        if self.kda:
            cuts = (self.tokens - 1) // self.piece
            return rows + cuts * model.kda_heads * model.kda_head_dim**2 * FLOAT32
        pools = min(model.index_topk, self.tokens) // model.index_kpool
        return rows + self.tokens * 4 * pools

    def _latents(self) -> int:
        """Keys of all tokens, before and after their norm, and their gradients."""
        model, e = self.model, self.form.itemsize
        return self.tokens * model.kv_lora_rank * (4 * e + 2 * FLOAT32)

    def _blocks(self) -> int:
        """Temporary tensors of trimmed sites."""
        widest = self.tokens * max(
            self.model.hc_mult * self.model.dim, self.model.kda_heads * self.model.kda_head_dim
        )
        return 8 * FLOAT32 * min(row_blocks.ELEMENTS, widest) if self.form.trimmed else 0

    def _temporary(self, part: str, tokens: int) -> int:
        of_part = {
            "attention": self._kda if self.kda else self._dsa,
            "feed_forward": self._dense,
            "moe": self._moe,
        }
        if part in of_part:
            return of_part[part](tokens) + 2 * tokens * self.model.dim * self.form.itemsize
        if "norm" in part:
            trimmed = "rms_norm" in self.form.trimmed
            return 0 if trimmed else 3 * FLOAT32 * tokens * self.model.dim
        n, dim = self.model.hc_mult, self.model.dim
        if part == "writes":
            lean = self.form.fused_streams or "hyper_connections" in self.form.trimmed
            return tokens * (dim + (0 if lean else 2 * n * dim)) * self.form.itemsize
        if self.form.fused_streams:
            m = n * n + 2 * n
            return FLOAT32 * (tokens * (2 * m + 2 * n + 1) + 16 * m * n * dim)
        if "hyper_connections" in self.form.trimmed:
            return tokens * 2 * self.model.hc_sinkhorn_iters * FLOAT32 * (n * n + n)
        return tokens * 4 * FLOAT32 * n * dim

    def _kda(self, tokens: int) -> int:
        model, e = self.model, self.form.itemsize
        heads, d = model.kda_heads, model.kda_head_dim
        width = heads * d
        gradients = tokens * 9 * width * e
        if "rms_norm" not in self.form.trimmed:
            gradients += tokens * 3 * width * FLOAT32
        if self.form.fla:
            row = 28 * width + 7 * width * e + width * d * e // 32 + 512 * heads
            return gradients + tokens * row
        together = min(tokens, SEGMENT * CHUNK)
        return gradients + together * width * FLOAT32 * (40 + 6 * -(-d // CHUNK))

    def _dsa(self, tokens: int) -> int:
        model, e = self.model, self.form.itemsize
        queries, values = model.n_heads * model.qk_head_dim, model.n_heads * model.v_head_dim
        row = e * (queries + values + 2 * model.q_lora_rank + 2 * model.kv_lora_rank)
        maps = 4 * FLOAT32 * (queries + values) * model.kv_lora_rank
        chunks = {"torch": 2 * absorbed.CHUNK_BYTES}
        if self.form.sparse_mla == "dense":
            width = model.qk_head_dim + model.v_head_dim
            expanded = self.tokens * dense.heads_together(self.tokens, model.n_heads, width) * width
            chunks["dense"] = model.sparse_mla_chunk + expanded * (2 * e + FLOAT32)
        latents = self.tokens * model.kv_lora_rank * (e + FLOAT32)
        kernel = model.sparse_mla_chunk + latents
        chunk = chunks.get(self.form.sparse_mla, kernel)
        return tokens * (row + 2 * FLOAT32 * model.kv_lora_rank) + chunk + maps

    def _kept_by_kernel(self) -> int:
        """Latent outputs and LSE of a piece."""
        if self.form.sparse_mla in ("torch", "dense"):
            return 0
        model = self.model
        row = model.n_heads * (model.kv_lora_rank * self.form.itemsize + FLOAT32)
        return self.piece * row

    def _dense(self, tokens: int) -> int:
        return tokens * self.model.dense_hidden_dim * self.form.itemsize * self._of_swiglu()

    def _moe(self, tokens: int) -> int:
        return max(self._routed(tokens), self._shared()) + self._routing(tokens)

    def _routed(self, tokens: int) -> int:
        model, e, k = self.model, self.form.itemsize, self.model.top_k
        outer, inner = k * model.dim, k * model.expert_hidden_dim
        row = e * max(outer, inner, 2 * outer - inner)
        if "swiglu" not in self.form.trimmed:
            row += 3 * inner * e
        if "expert_combine" not in self.form.trimmed:
            row = max(row, 2 * outer * FLOAT32)
        return tokens * row

    def _routing(self, tokens: int) -> int:
        """Gradients of logits and weights, and the router's copies."""
        model = self.model
        assert model.n_experts is not None
        copies = 0 if "router" in self.form.trimmed else 2 * model.dim
        return tokens * FLOAT32 * (model.n_experts + 2 * model.top_k + copies)

    def _shared(self) -> int:
        """Gradients within the shared experts; where they are cut, with what a piece keeps."""
        inner = self.model.n_shared_experts * self.model.expert_hidden_dim
        tokens = self.piece if self.cut_shared else self.tokens
        kept = shared_bytes(self.model, tokens, self.form) if self.cut_shared else 0
        return kept + tokens * inner * self.form.itemsize * self._of_swiglu()

    def _needed_by_cut_moe(self) -> int:
        assert self.experts is not None
        piece = self.experts.computed_tokens(self.tokens)
        chunk = dispatched_bytes(self.model, piece, self.form) + self._routed(piece)
        row = self.model.top_k * self.model.dim * self.form.itemsize
        chunk += 2 * self.experts.ahead * piece * row
        # Gradients of outputs and of tokens, of these the shared experts' as well.
        rows = 2 * (self.tokens + piece) + self.tokens * bool(self.model.n_shared_experts)
        whole = rows * self.model.dim * self.form.itemsize
        return whole + max(chunk, self._shared()) + self._routing(self.tokens)

    def _of_swiglu(self) -> int:
        return 3 if "swiglu" in self.form.trimmed else 6
