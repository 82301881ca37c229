"""KDA a piece of the tokens at a time: between pieces pass a state per head and three tokens."""

from dataclasses import dataclass

import torch

from components.models.glm_flash.chunked.function import Outcome, Part, run_in_pieces
from components.models.glm_flash.chunked.pieces import Piece, cut
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.kda import KDA
from components.models.glm_flash.short_conv import ShortConv


class ChunkedKDA(KDA):
    """``KDA`` whose projections, convolutions, recurrence and norm exist for a piece at a time."""

    @dataclass(kw_only=True, slots=True)
    class Config(KDA.Config):
        chunk_tokens: int
        """Tokens of a piece; a multiple of what the kernels compute together."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        """(B, L, D) -> (B, L, D)."""
        part = _KdaPart(self, documents)
        return run_in_pieces(part, x.flatten(0, 1)).view_as(x)

    def convolve(self, conv: ShortConv, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        """See ``KDA``; without hooks, as ``Part`` demands."""
        return conv.forward(x, documents)


class _KdaPart(Part):
    module: ChunkedKDA
    stateful = True

    def __init__(self, module: ChunkedKDA, documents: Documents) -> None:
        super().__init__(module, cut(documents.lengths, module.chunk_tokens))
        self.documents = documents
        self.reach = module.q_conv.weight.shape[-1] - 1

    def run(
        self,
        piece: Piece,
        x: torch.Tensor,
        shared: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        choice: torch.Tensor | None,
    ) -> Outcome:
        module, before = self.module, len(x) - len(piece)
        convolved = module.convolved(x, self._seen(piece, before))
        q, k, v = (t[before:] for t in convolved)
        own = x[before:]
        raw_gate, beta = module.gates(own)
        out, left = module.core.piece(q, k, v, raw_gate, beta, piece.lengths, state, piece.carries)
        return Outcome(module.project(out, own), left)

    def _seen(self, piece: Piece, before: int) -> Documents:
        """The documents of the piece and of the rows before it, as if nothing came before."""
        source = slice(piece.begin - before, piece.stop)
        first, *rest = piece.lengths
        # Made on the device: the lengths are known here, and asking for them would wait for it.
        position, count = self.documents.position[source], before + first
        counted = torch.arange(count, device=position.device)
        return Documents(
            position=torch.cat([counted, position[count:]]),
            start=(self.documents.start[source] - source.start).clamp_min(0),
            lengths=(count, *rest),
        )
