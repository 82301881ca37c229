"""SwiGLU with limits, a piece of the tokens at a time: dense layers and shared experts."""

from dataclasses import dataclass

import torch

from components.models.glm_flash.chunked.function import Outcome, Part, run_in_pieces
from components.models.glm_flash.chunked.pieces import Piece, cut
from components.models.glm_flash.experts import ClampedFeedForward


class ChunkedFeedForward(ClampedFeedForward):
    """``ClampedFeedForward`` that never holds its inner width for more than a piece."""

    @dataclass(kw_only=True, slots=True)
    class Config(ClampedFeedForward.Config):
        chunk_tokens: int
        """Tokens of a piece."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        flat = x.flatten(0, -2)
        part = _FeedForwardPart(self, cut((len(flat),), self.chunk_tokens))
        return run_in_pieces(part, flat).view_as(x)


class _FeedForwardPart(Part):
    module: ChunkedFeedForward

    def run(
        self,
        piece: Piece,
        x: torch.Tensor,
        shared: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        choice: torch.Tensor | None,
    ) -> Outcome:
        return Outcome(ClampedFeedForward.forward(self.module, x))
