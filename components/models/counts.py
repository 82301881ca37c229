"""Parameter counts of any decoder, without allocating a parameter."""

from dataclasses import dataclass

import torch
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec

# Part of a decoder -> what the names of its parameters contain; the first match wins. A module
# named "norm", or "..._norm", outside of them belongs to the residual stream.
_PARTS = (
    ("embedding", "tok_embeddings."),
    ("lm_head", "lm_head."),
    ("routed_experts", ".moe.routed_experts."),
    ("shared_experts", ".moe.shared_experts."),
    ("router", ".moe.router."),
    ("indexer", ".attention.indexer."),
    ("attention", ".attention."),
    ("hyper_connections", ".attention_hc."),
    ("hyper_connections", ".ffn_hc."),
    ("dense_ffn", ".feed_forward."),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Numbers of parameters. The parts add up to ``total``; buffers are not parameters."""

    total: int
    """Everything; a matrix shared by the embedding and the head counts once."""
    active_per_token: int
    """``total`` less the input embedding (a row lookup, no arithmetic) and the experts that a token
    is not routed to. The output head counts: of two vocabulary matrices, one is active."""
    embedding: int
    """Input embedding; 0 when it is the output head's matrix."""
    lm_head: int
    """Output head."""
    attention: int
    """Projections, per-head norms, sinks, convolutions and gates of all layers."""
    indexer: int
    """What picks the keys of sparse attention. 0 for other attention."""
    hyper_connections: int
    """What mixes several residual streams. 0 for a single stream."""
    routed_experts: int
    """All routed experts of all layers."""
    shared_experts: int
    """Experts that every token visits, with their gates."""
    router: int
    """Router weights of all layers."""
    dense_ffn: int
    """Feed-forward layers without experts."""
    norms: int
    """Norms of the residual stream."""
    other: int
    """What is none of the above. 0 for a plain decoder."""


def count_parameters(spec: ModelSpec) -> Counts:
    """Count the parameters of ``spec``'s decoder on the meta device: no memory, any size."""
    with torch.device("meta"):
        model = spec.model.build()
    tied = getattr(model, "enable_weight_tying", False)
    parts = dict.fromkeys((*(part for part, _ in _PARTS), "norms", "other"), 0)
    for name, parameter in model.named_parameters():
        part = _part_of(name)
        parts["lm_head" if tied and part == "embedding" else part] += parameter.numel()
    idle = sum(_idle_parameters(module) for module in model.modules() if isinstance(module, MoE))
    total = sum(parts.values())
    return Counts(total=total, active_per_token=total - parts["embedding"] - idle, **parts)


def _part_of(name: str) -> str:
    for part, marker in _PARTS:
        if marker in name:
            return part
    module = name.split(".")[-2:-1]
    is_norm = bool(module) and (module[0] == "norm" or module[0].endswith("_norm"))
    return "norms" if is_norm else "other"


def _idle_parameters(moe: MoE) -> int:
    """Routed-expert parameters of one layer that a token does not visit."""
    router = moe.router
    routed = sum(parameter.numel() for parameter in moe.routed_experts.parameters())
    return routed - routed * router.top_k // router.num_experts
