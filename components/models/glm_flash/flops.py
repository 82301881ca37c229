"""Arithmetic of one training step per token, for throughput in TFLOP/s.

Two operations per multiply-add. Backward counts twice the forward of what is trained; what is not
(as a rule the indexers) counts once. Recomputation is not counted, nor is the loss of the indexers.
"""

from typing import TYPE_CHECKING

from torchtitan.models.common import Linear

from components.models.glm_flash.kda import KDA
from components.models.glm_flash.mla import SparseMLA

if TYPE_CHECKING:
    from components.models.glm_flash.block import GlmFlashBlock
    from components.models.glm_flash.decoder import GlmFlashDecoder

_KDA_CHUNK = 64


def training_flops_per_token(model: "GlmFlashDecoder.Config", seq_len: int) -> int:
    """FLOPs per token of forward and backward over one document of ``seq_len`` tokens."""
    forward = 2 * model.dim * model.vocab_size
    indexers = 0.0
    for layer in model.layers:
        forward += _feed_forward(layer, model.dim) + 2 * _site(model.dim, model.streams)
        mixer, indexer = mixer_flops(layer.attention, seq_len)
        forward, indexers = forward + mixer, indexers + indexer
    backbone_passes = 1 if model.train == "indexers" else 3
    indexer_passes = 1 if model.train == "backbone" else 3
    return round(backbone_passes * forward + indexer_passes * indexers)


def mixer_flops(mixer: KDA.Config | SparseMLA.Config, seq_len: int) -> tuple[float, float]:
    """FLOPs per token of a mixer's forward over one document, and of its indexer's."""
    if isinstance(mixer, KDA.Config):
        return _kda(mixer), 0.0
    return _mla(mixer, seq_len), _indexer(mixer, seq_len)


def _linear(*layers: Linear.Config) -> int:
    return sum(2 * layer.in_features * layer.out_features for layer in layers)


def _kda(kda: KDA.Config) -> float:
    """Projections, convolutions, and the chunked form of the recurrence."""
    heads, d, chunk = kda.core.heads, kda.core.head_dim, _KDA_CHUNK
    projections = _linear(
        kda.q_proj, kda.k_proj, kda.v_proj, kda.f_a_proj, kda.f_b_proj, kda.b_proj,
        kda.g_a_proj, kda.g_b_proj, kda.o_proj,
    )  # fmt: skip
    convolutions = sum(2 * c.channels * c.kernel_size for c in (kda.q_conv, kda.k_conv, kda.v_conv))
    # Five products of (chunk, d) by (chunk, d), three with the (d, d) state, and the inverse of a
    # unit triangular (chunk, chunk) matrix.
    core = heads * (10 * chunk * d + 6 * d * d + chunk * chunk * 2 / 3)
    return projections + convolutions + core


def _mla(mla: SparseMLA.Config, seq_len: int) -> float:
    """Projections, with keys and values absorbed into queries and outputs, and attention."""
    heads = mla.q_b_proj.out_features // mla.head_dim
    # kv_b is applied to queries and outputs, once per token: as many products as to the latent.
    projections = _linear(mla.q_a_proj, mla.q_b_proj, mla.kv_a_proj, mla.kv_b_proj, mla.o_proj)
    latent = mla.kv_a_proj.out_features
    return projections + 4 * heads * latent * mean_keys(mla, seq_len)


def _indexer(mla: SparseMLA.Config, seq_len: int) -> float:
    indexer = mla.indexer
    gate = 2 * indexer.dim * indexer.head_dim
    scores = 2 * indexer.heads * indexer.head_dim * (seq_len / 2 / indexer.kpool)
    return _linear(indexer.wq_b, indexer.wk, indexer.weights_proj) + gate + scores


def mean_keys(mla: SparseMLA.Config, seq_len: int) -> float:
    """Keys per query, on average over one document of ``seq_len`` tokens."""
    kpool, topk = mla.indexer.kpool, mla.indexer.topk
    dense = topk + kpool - 1
    if seq_len <= dense:
        return (seq_len + 1) / 2
    # Beyond that, topk keys and a tail of 0 to kpool - 1.
    later = topk + (kpool - 1) / 2
    return (dense * (dense + 1) / 2 + (seq_len - dense) * later) / seq_len


def _feed_forward(layer: "GlmFlashBlock.Config", dim: int) -> int:
    if layer.moe is None:
        ffn = layer.feed_forward
        assert ffn is not None
        return _linear(ffn.w1, ffn.w2, ffn.w3)
    moe = layer.moe
    router = _linear(moe.router.gate)
    routed = 6 * dim * moe.router.top_k * moe.routed_experts.inner_experts.hidden_dim
    shared = moe.shared_experts
    return router + routed + (_linear(shared.w1, shared.w2, shared.w3) if shared else 0)


def _site(dim: int, n: int) -> int:
    """One hyper-connection: its logits, reading the streams, and writing them."""
    return 2 * (n * n + 2 * n) * n * dim + 2 * dim * (2 * n + n * n)
