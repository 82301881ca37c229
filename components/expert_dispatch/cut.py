"""How a recipe's routed experts go through a layer's tokens, where they keep nothing but those."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.expert_dispatch.partition import ChunkRule

if TYPE_CHECKING:
    from components.core.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What decides how many rows of experts exist at one time."""

    rule: ChunkRule

    share: float = 1.0
    """Rows of a layer that a rank computes over those that it sends, at most. With experts that are
    not planned it may be anything, and is taken to be 1."""

    ahead: int = 0
    """Chunks whose rows are on their way while one is computed."""

    def computed_tokens(self, tokens: int) -> int:
        """Tokens whose rows a rank computes in one chunk that is routed like the layer.

        Args:
            tokens: of one rank.
        """
        return math.ceil(self.rule.cut(tokens).chunk_tokens * self.share)


def cut_of(recipe: "Recipe") -> Cut | None:
    """By whichever component has the experts run again in backward; None if none does."""
    components = recipe.components
    if components.sequence_chunked_moe.enabled:
        return Cut(rule=components.sequence_chunked_moe.rule())
    for config, ahead in ((components.llep, 0), (components.pipelined_llep, 1)):
        if config.enabled:
            # Where nothing is handed on, a rank may have up to the threshold.
            share = max(config.capacity_factor, config.threshold)
            return Cut(rule=config.rule(), share=share, ahead=ahead)
    return None
