"""GLM-5.3-Flash's text model: its settings. Every default is the published model's value."""

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torchtitan.protocols.model_spec import ModelSpec

from components.core.units import Bytes, Tokens
from components.models.glm_flash import checks, working_set
from components.models.glm_flash.fla_kernels import fla_kda, fla_short_conv
from components.models.glm_flash.fused_connections import choose_connection_kernels
from components.models.glm_flash.sparse_kernels import choose_sparse_kernels
from components.models.glm_flash.spec import build_glm_flash_spec
from components.models.glm_flash.tensor_parallel import part_of_rank
from components.models.position import NoPosition, Position
from components.models.settings import Finding, KernelChoice, ModelSettings
from kernels.kda.fla import check_width
from kernels.tuned import fla as tuned

if TYPE_CHECKING:
    from components.core.recipe import Recipe

Mixer = Literal["kda", "dsa"]
KdaKernel = Literal["auto", "fla", "reference"]
SparseMlaKernel = Literal["auto", "tilelang", "torch", "dense"]
IndexerKernel = Literal["auto", "triton", "torch"]
HyperConnectionsKernel = Literal["auto", "triton", "torch"]


def _published_layers() -> list[Mixer]:
    """Three KDA layers before each DSA layer, and one after the last."""
    return [*(("kda", "kda", "kda", "dsa") * 11), "kda"]


@dataclass(kw_only=True, slots=True)
class GlmFlashModel(ModelSettings):
    """A decoder of KDA and sparse-attention layers over several residual streams, with experts.

    KDA is gated linear attention with a short convolution; DSA is multi-head latent attention
    (MLA) without positions over the keys that an indexer picks; the residual stream is
    ``hc_mult`` streams mixed by manifold-constrained hyper-connections (mHC) around every mixer
    and every feed-forward part. Names in parentheses are keys of the published ``config.json``
    (``text_config``).
    """

    n_layers: int = 45
    """Decoder layers (num_hidden_layers)."""

    dim: int = 4096
    """Width of one residual stream (hidden_size); a multiple of 8."""

    vocab_size: int = 154_880
    """Rows of each of the two vocabulary matrices (vocab_size); at least the tokenizer's largest
    id + 1."""

    max_seq_len: Tokens = 2**20
    """Longest sequence that may be trained on, in tokens (max_position_embeddings). Nothing in the
    model depends on it: there are no position embeddings."""

    position: Position = field(default_factory=NoPosition)
    """Nothing to choose: positions are not embedded (kind "none")."""

    layer_types: list[Mixer] = field(default_factory=_published_layers)
    """Mixer of each layer, first to last (layer_types, where linear_attention is kda and
    deepseek_sparse_attention is dsa)."""

    kda_heads: int = 64
    """Heads of a KDA layer (linear_attn_config.num_heads)."""

    kda_head_dim: int = 128
    """Width of a KDA head's queries, keys and values, and rank of its two gates
    (linear_attn_config.head_dim)."""

    conv_kernel: int = 4
    """Tokens that the short convolution of a KDA layer sees, the current one included
    (linear_attn_config.short_conv_kernel_size)."""

    gate_lower_bound: float = -5.0
    """Lowest log decay of a KDA key channel per token, in [-5, 0)
    (linear_attn_config.gate_lower_bound)."""

    n_heads: int = 64
    """Query heads of a DSA layer (num_attention_heads)."""

    q_lora_rank: int = 1536
    """Width of the query latent of a DSA layer, which the indexer reads too (q_lora_rank)."""

    kv_lora_rank: int = 512
    """Width of the key/value latent that all heads of a DSA layer share (kv_lora_rank)."""

    qk_head_dim: int = 256
    """Width of a DSA head's queries and keys (qk_head_dim = qk_nope_head_dim: none is rotary)."""

    v_head_dim: int = 256
    """Width of a DSA head's values (v_head_dim)."""

    index_n_heads: int = 32
    """Scoring heads of the indexer (index_n_heads). With few of them many pools tie at a score of
    exactly zero."""

    index_head_dim: int = 128
    """Width of the indexer's queries and pooled keys (index_head_dim)."""

    index_topk: int = 2048
    """Tokens in the pools that one query selects (index_topk); a multiple of index_kpool."""

    index_kpool: int = 4
    """Consecutive tokens of a document that are scored and selected as one pool (index_kpool)."""

    n_dense_layers: int = 3
    """Leading layers with one dense SwiGLU in place of experts (first_k_dense_replace)."""

    dense_hidden_dim: int = 12_288
    """Inner width of the dense layers' SwiGLU (intermediate_size)."""

    n_experts: int | None = 288
    """Routed experts per layer (n_routed_experts); null when every layer is dense."""

    top_k: int = 8
    """Routed experts that each token visits (num_experts_per_tok)."""

    expert_hidden_dim: int = 2048
    """Inner width of one expert's SwiGLU (moe_intermediate_size); a multiple of 8."""

    n_shared_experts: int = 1
    """Experts that every token visits besides the routed ones, fused into one SwiGLU
    (n_shared_experts)."""

    n_expert_groups: int = 1
    """Equal groups of consecutive experts that routing ranks first; 1: no groups (n_group)."""

    n_limited_groups: int = 1
    """Groups whose experts a token may visit: those with the largest sum of their two best scores
    (topk_group)."""

    route_norm: bool = True
    """Divide the scores of a token's top_k experts by their sum (norm_topk_prob)."""

    route_scale: float = 2.5
    """Factor on the routed experts' weights, after route_norm (routed_scaling_factor)."""

    swiglu_limit: float = 10.0
    """Bound inside every SwiGLU: the gate is at most this, the other half within plus or minus it
    (swiglu_limit)."""

    load_balance_coeff: float = 1e-3
    """Step of the per-expert routing bias: after each optimizer step an overloaded expert's bias
    falls and an underloaded one's rises by this much (scores are in 0..1). 0: the bias stays as it
    is. Not in the published configuration."""

    hc_mult: int = 4
    """Residual streams (hc_mult)."""

    hc_sinkhorn_iters: int = 20
    """Row and column normalisations of the matrix that mixes the streams (hc_sinkhorn_iters)."""

    hc_eps: float = 1e-6
    """Added to the reading weights, to the mixing matrix after its softmax, and to every sum of
    the normalisations (hc_eps)."""

    norm_eps: float = 1e-5
    """Added to the mean square inside every RMS norm (rms_norm_eps)."""

    init_std: float = 0.02
    """Standard deviation of the initial weight matrices (initializer_range)."""

    kda_kernel: KdaKernel = "auto"
    """What computes KDA and its convolution. "fla": the Triton kernels of the package fla-core,
    CUDA only; "reference": plain torch, any device, slow; "auto": "fla" on CUDA, "reference"
    elsewhere."""

    sparse_mla_kernel: SparseMlaKernel = "auto"
    """What computes attention over the chosen pools. "tilelang": this project's kernels for Hopper
    GPUs (sm_90); "torch": plain torch that gathers, any device, slow; "dense": masked dense
    attention, quadratic in the length of a document, a baseline to measure against; "auto":
    "tilelang" where it runs, else "torch", and the log says which and why."""

    indexer_kernel: IndexerKernel = "auto"
    """What scores and chooses pools. "triton": this project's kernels, for GPUs from sm_80 on;
    "torch": plain torch, any device, slow; "auto": "triton" where it runs, else "torch", and the
    log says which and why."""

    hyper_connections_kernel: HyperConnectionsKernel = "auto"
    """What maps, reads and merges the residual streams. "triton": this project's kernels, for GPUs
    from sm_80 on and two or four streams, which keep what ``precision_trimming`` would and less;
    "torch": plain torch, any device; "auto": "triton" where it runs, else "torch", and the log says
    which and why."""

    sparse_mla_chunk: Bytes = 2**30
    """Memory of the queries whose attention "tilelang" or "dense" computes together. With
    "tilelang", 64 heads and kv_lora_rank 512, a GiB is 8,192 queries in forward and 4,096 in
    backward."""

    @property
    def hidden_width(self) -> int:
        """See ``ModelSettings.hidden_width``: all residual streams."""
        return self.hc_mult * self.dim

    def build_spec(self) -> ModelSpec:
        """See ``ModelSettings.build_spec``."""
        self.refuse_problems()
        return build_glm_flash_spec(self)

    def on_one_rank(self, recipe: "Recipe") -> "GlmFlashModel":
        """See ``ModelSettings.on_one_rank``."""
        return part_of_rank(self, recipe)

    def choose_kernels(self, device: str, itemsize: int = 2) -> KernelChoice:
        """See ``ModelSettings.choose_kernels``."""
        choices = (
            self._choose_kda(device),
            choose_sparse_kernels(self, device, itemsize),
            choose_connection_kernels(self, device, itemsize),
        )
        return KernelChoice(
            overrides=sum((choice.overrides for choice in choices), ()),
            notes=sum((choice.notes for choice in choices), ()),
        )

    def _choose_kda(self, device: str) -> KernelChoice:
        wanted, auto = self.kda_kernel, self.kda_kernel == "auto"
        kernel = ("fla" if device == "cuda" else "reference") if auto else wanted
        notes = (f"KDA kernel: {kernel}" + (f" (auto on {device})" if auto else ""),)
        if kernel == "reference":
            return KernelChoice(notes=notes)
        self._refuse_without_fla(device)
        state = tuned.note()
        notes = (f"{notes[0]}, {state}" if state else notes[0],)
        return KernelChoice(overrides=(fla_kda, fla_short_conv), notes=notes)

    def check(self) -> list[Finding]:
        """See ``ModelSettings.check``."""
        return checks.check_model(self)

    def check_run(self, recipe: "Recipe") -> list[Finding]:
        """See ``ModelSettings.check_run``."""
        return checks.check_run(self, recipe)

    def layer_saved_bytes(self, recipe: "Recipe", device: str = "cuda") -> list[int] | None:
        """See ``ModelSettings.layer_saved_bytes``."""
        return working_set.layer_bytes(self, recipe, device)

    def layer_working_set_bytes(self, recipe: "Recipe", device: str = "cuda") -> list[int] | None:
        """See ``ModelSettings.layer_working_set_bytes``."""
        return working_set.working_sets(self, recipe, device)

    def _refuse_without_fla(self, device: str) -> None:
        """Raise what keeps fla's kernels from running, as ``choose_kernels`` describes."""
        if device != "cuda":
            raise ValueError(
                f"model.kda_kernel: 'fla' runs on CUDA only, and this run is on the {device}; "
                "legal here: 'reference' or 'auto'"
            )
        if importlib.util.find_spec("fla") is None:
            raise ValueError(
                f"model.kda_kernel: {self.kda_kernel!r} needs the package fla-core on CUDA, which "
                "is not installed; install it with the rest of requirements.lock, or use "
                "'reference', which is slow"
            )
        check_width(self.kda_head_dim)
