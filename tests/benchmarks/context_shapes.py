"""Shapes of the benchmark of context parallelism. Importing this needs no torchtitan."""

from dataclasses import dataclass
from typing import Any

MIXERS = ("kda", "dsa", "softmax")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Layers, and the batch that goes through them."""

    tokens: int
    """Of all ranks together, in one document."""

    gate: tuple[int, ...]
    """Lengths of the documents that results are compared on."""

    dtype: str

    tolerance: float
    """At the gate: ``|out - ref| / |ref|`` of the output and of every gradient. Both sides are of
    ``dtype``: bfloat16 rounds between all projections, and inside kernels."""

    glm: dict[str, Any]
    """Settings of a ``GlmFlashModel``, which has the KDA and the sparse-attention layer."""

    moe: dict[str, Any]
    """Settings of a ``MoEModel``, which has the softmax attention."""


_GLM = {"n_layers": 4, "layer_types": ["kda", "kda", "kda", "dsa"]}
_TINY_GLM = _GLM | {
    "dim": 32, "kda_heads": 4, "kda_head_dim": 16, "n_heads": 2, "q_lora_rank": 16,
    "kv_lora_rank": 8, "qk_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
    "index_topk": 16,
}  # fmt: skip
# The MoE family's attention; what else its settings ask for is not built.
_MOE = {
    "n_layers": 1, "dim": 7168, "n_heads": 56, "n_kv_heads": 8, "head_dim": 128, "n_experts": 8,
    "top_k": 8, "expert_hidden_dim": 2048, "vocab_size": 200_000, "max_seq_len": 2**20,
    "rope_theta": 1e7,
}  # fmt: skip
_TINY_MOE = _MOE | {
    "dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "expert_hidden_dim": 64,
    "vocab_size": 320, "max_seq_len": 512,
}  # fmt: skip


def _published(tokens: int) -> Shape:
    return Shape(
        tokens=tokens,
        gate=(3001, 5, 5186),
        dtype="bfloat16",
        tolerance=5e-2,
        glm=_GLM,
        moe=_MOE | {"max_seq_len": tokens},
    )


SIZES = {
    "32k": _published(32_768),
    "128k": _published(131_072),
    "tiny": Shape(
        tokens=96, gate=(30, 3, 33), dtype="float32", tolerance=1e-4, glm=_TINY_GLM, moe=_TINY_MOE
    ),
}
"""The published widths of GLM-5.3-Flash, and those of the 120B to 667B family; "tiny" runs on a
CPU."""
