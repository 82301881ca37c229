"""Chunked parts in place of whole ones, through torchtitan's overrides."""

from torchtitan.config import derive, override

from components.models.glm_flash.chunked.feed_forward import ChunkedFeedForward
from components.models.glm_flash.chunked.kda import ChunkedKDA
from components.models.glm_flash.chunked.mla import ChunkedSparseMLA
from components.models.glm_flash.experts import ClampedFeedForward
from components.models.glm_flash.kda import KDA
from components.models.glm_flash.mla import SparseMLA


@override(target=KDA.Config, description="KDA in chunks of tokens")
def chunked_kda(cfg: KDA.Config, *, chunk_tokens: int) -> ChunkedKDA.Config:
    return derive(cfg, ChunkedKDA.Config, chunk_tokens=chunk_tokens)


@override(target=SparseMLA.Config, description="sparse attention in chunks of queries")
def chunked_dsa(cfg: SparseMLA.Config, *, chunk_tokens: int) -> ChunkedSparseMLA.Config:
    return derive(cfg, ChunkedSparseMLA.Config, chunk_tokens=chunk_tokens)


@override(
    target=ClampedFeedForward.Config,
    fqns=["*.feed_forward"],
    description="SwiGLU of dense layers in chunks of tokens",
)
def chunked_feed_forward(
    cfg: ClampedFeedForward.Config, *, chunk_tokens: int
) -> ChunkedFeedForward.Config:
    return derive(cfg, ChunkedFeedForward.Config, chunk_tokens=chunk_tokens)


@override(
    target=ClampedFeedForward.Config,
    fqns=["*.shared_experts"],
    description="SwiGLU of shared experts in chunks of tokens",
)
def chunked_shared_expert(
    cfg: ClampedFeedForward.Config, *, chunk_tokens: int
) -> ChunkedFeedForward.Config:
    return derive(cfg, ChunkedFeedForward.Config, chunk_tokens=chunk_tokens)
