"""Mixture-of-experts decoders with grouped-query attention: settings and their checks."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torchtitan.protocols.model_spec import ModelSpec

from components.core.problems import listed_divisors
from components.core.units import Tokens
from components.models.moe_spec import build_moe_spec
from components.models.position import Position
from components.models.ranges import below, not_positive, uneven_expert_widths
from components.models.settings import Finding
from components.models.titan_attention import TitanAttentionSettings

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_AT_LEAST_ONE = (
    "n_layers",
    "dim",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "n_experts",
    "top_k",
    "expert_hidden_dim",
    "vocab_size",
    "max_seq_len",
)
_ABOVE_ZERO = ("rope_theta", "route_scale", "norm_eps", "init_std")

# flex attention compiles for no smaller head.
_SMALLEST_HEAD = 16


@dataclass(kw_only=True, slots=True)
class MoEModel(TitanAttentionSettings):
    """A pre-norm decoder whose feed-forward layers route each token to ``top_k`` of ``n_experts``.

    Every module is torchtitan's: its Qwen3 decoder (with or without the query/key norm), grouped
    SwiGLU experts, rotary embedding, and its own parallelisation. Routing drops no token. Experts
    compute in bfloat16 whatever the training precision.

    There is no state-dict adapter for Hugging Face checkpoints: torchtitan's adapter for this
    decoder silently drops the per-expert routing bias and shared experts, so an export would
    compute something else than the model that was trained.
    """

    n_layers: int
    """Decoder layers."""

    dim: int
    """Width of the residual stream; a multiple of 8."""

    n_heads: int
    """Query heads."""

    n_kv_heads: int
    """Key/value heads; divides n_heads."""

    head_dim: int
    """Width of one head; even, at least 16. n_heads x head_dim need not equal dim."""

    n_experts: int
    """Routed experts per layer."""

    top_k: int
    """Routed experts that each token visits."""

    expert_hidden_dim: int
    """Inner width of one expert's SwiGLU; a multiple of 8."""

    vocab_size: int
    """Rows of each vocabulary matrix; at least the tokenizer's largest id + 1."""

    max_seq_len: Tokens
    """Longest sequence that may be trained on, in tokens."""

    n_shared_experts: int = 0
    """Experts that every token visits besides the routed ones, fused into one SwiGLU."""

    n_dense_layers: int = 0
    """Leading layers with one dense SwiGLU in place of experts."""

    dense_hidden_dim: int | None = None
    """Inner width of the dense layers' SwiGLU; null when n_dense_layers is 0."""

    rope_theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths; larger for longer contexts."""

    position: Position = field(default_factory=Position)
    """How positions are told apart, and how that stretches to longer contexts."""

    score_func: Literal["sigmoid", "softmax"] = "sigmoid"
    """What turns router logits into scores (float32)."""

    route_norm: bool = True
    """Divide the scores of a token's top_k experts by their sum."""

    route_scale: float = 1.0
    """Factor on the routed experts' scores, after route_norm."""

    load_balance_coeff: float | None = 1e-3
    """Step of the per-expert routing bias: after each optimizer step an overloaded expert's bias
    falls and an underloaded one's rises by this much (scores are in 0..1). null: no balancing."""

    qk_norm: bool = False
    """RMS-normalise queries and keys per head before the rotary embedding."""

    tie_embeddings: bool = False
    """Share one matrix between the input embedding and the output head."""

    norm_eps: float = 1e-6
    """Added to the mean square inside every RMS norm."""

    init_std: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream use
    init_std / sqrt(2 x n_layers)."""

    comm_backend: Literal["standard", "deepep", "hybridep", "minimal_async_ep"] = "standard"
    """torchtitan's token exchange under expert parallelism. "standard": all-to-all collectives;
    the others need CUDA, expert parallelism above 1, and deepep and hybridep an extra package."""

    def build_spec(self) -> ModelSpec:
        """See ``ModelSettings.build_spec``."""
        self.refuse_problems()
        return build_moe_spec(self)

    def check(self) -> list[Finding]:
        """See ``ModelSettings.check``."""
        problems = TitanAttentionSettings.check(self) + self._check_ranges()
        problems += self._check_position()
        if not problems:
            # Divisibility is worth reading only once every number is in range.
            problems = self._check_attention() + self._check_experts() + self._check_dense()
        return problems

    def check_run(self, recipe: "Recipe") -> list[Finding]:
        """See ``ModelSettings.check_run``."""
        found = self.position.check_length(recipe.training.seq_len)
        found += self._check_alibi_run(recipe)
        alone = recipe.parallelism.expert_parallel_degree == 1
        if self.comm_backend == "standard" or not alone:
            return found
        message = (
            f"{self.comm_backend!r} exchanges tokens between expert-parallel ranks; there is only "
            "one; use 'standard', or parallelism.expert_parallel_degree 2 or more"
        )
        return [*found, ("model.comm_backend", message)]

    def _check_alibi_run(self, recipe: "Recipe") -> list[Finding]:
        degree = recipe.parallelism.context_parallel_degree
        stock = degree > 1 and not recipe.components.context_parallel.enabled
        if self.position.kind != "alibi" or not stock:
            return []
        message = (
            f"'alibi' cannot run with parallelism.context_parallel_degree {degree} as torchtitan "
            "splits it, whose ranks hold tokens without their distances; legal: 'rope' or 'none', "
            "components.context_parallel.enabled=true, or parallelism.context_parallel_degree 1"
        )
        return [("model.position.kind", message)]

    def _check_ranges(self) -> list[Finding]:
        found = [
            *below(self, _AT_LEAST_ONE, 1),
            *below(self, ("n_shared_experts", "n_dense_layers"), 0),
            *not_positive(self, _ABOVE_ZERO),
        ]
        if self.load_balance_coeff is not None and not self.load_balance_coeff > 0:
            found.append(
                (
                    "model.load_balance_coeff",
                    f"{self.load_balance_coeff} is not positive; "
                    "legal: above 0 (usually 0.001), or null for no balancing",
                )
            )
        return found

    def _check_position(self) -> list[Finding]:
        if self.position.scaling == "library":
            message = (
                "'library' keeps what a model of torchtitan was published with, and this is none; "
                "legal: 'none', 'linear', 'ntk', 'yarn', 'llama'"
            )
            return [("model.position.scaling", message)]
        found = self.position.check()
        if self.position.kind == "alibi" and self.attention == "varlen":
            message = (
                "'alibi' adds to attention scores, which model.attention 'varlen' cannot; "
                "legal: 'rope' or 'none', or model.attention 'auto', 'flex' or 'sdpa'"
            )
            found.append(("model.position.kind", message))
        return found

    def _check_attention(self) -> list[Finding]:
        found = []
        if self.n_heads % self.n_kv_heads:
            found.append(
                (
                    "model.n_kv_heads",
                    f"{self.n_kv_heads} does not divide model.n_heads = {self.n_heads}; "
                    f"legal: {listed_divisors(self.n_heads)}",
                )
            )
        if self.head_dim % 2 or self.head_dim < _SMALLEST_HEAD:
            found.append(
                (
                    "model.head_dim",
                    f"{self.head_dim} does not suit the rotary embedding and flex attention; "
                    f"legal: an even number, {_SMALLEST_HEAD} or more",
                )
            )
        return found

    def _check_experts(self) -> list[Finding]:
        found = []
        if self.top_k > self.n_experts:
            found.append(
                (
                    "model.top_k",
                    f"{self.top_k} is more than model.n_experts = {self.n_experts}; "
                    f"legal: 1 to {self.n_experts}",
                )
            )
        if self.top_k == 1 and self.route_norm:
            found.append(
                (
                    "model.route_norm",
                    "true with model.top_k = 1 makes every routing weight 1, so the router would "
                    "learn nothing; legal: false, or model.top_k 2 or more",
                )
            )
        found += uneven_expert_widths(self, ("dim", "expert_hidden_dim"))
        return found

    def _check_dense(self) -> list[Finding]:
        found = []
        if self.n_dense_layers >= self.n_layers:
            found.append(
                (
                    "model.n_dense_layers",
                    f"{self.n_dense_layers} leaves no expert layer of model.n_layers = "
                    f"{self.n_layers}; legal: 0 to {self.n_layers - 1} (for a dense model see "
                    "components.models.library.TitanModel)",
                )
            )
        if self.n_dense_layers and (self.dense_hidden_dim is None or self.dense_hidden_dim < 1):
            found.append(
                (
                    "model.dense_hidden_dim",
                    f"{self.dense_hidden_dim} with model.n_dense_layers = {self.n_dense_layers}; "
                    "legal: 1 or more",
                )
            )
        if not self.n_dense_layers and self.dense_hidden_dim is not None:
            found.append(
                (
                    "model.dense_hidden_dim",
                    f"{self.dense_hidden_dim} has no effect with model.n_dense_layers = 0; "
                    "legal: null, or model.n_dense_layers 1 or more",
                )
            )
        return found
