"""ALiBi (arXiv 2108.12409): attention scores fall with the distance, linearly, at a rate per head.

The distance is a difference of places, so it is right inside every document of a packed sequence;
what lies outside a document is the mask's affair. Places are indices unless they are given, as for
queries and keys that are pieces of a sequence.
"""

import torch


def alibi_slopes(heads: int) -> list[float]:
    """Rates of ``heads`` heads, per token of distance.

    A power of two n has 2 ** (-8 i / n) for i = 1 to n. Other counts take the rates of the power
    of two below, then every other rate, from the first, of the power of two above.

    Raises:
        ValueError: ``heads`` is less than 1.
    """
    if heads < 1:
        raise ValueError(f"{heads} heads; there must be at least 1")
    below = 1 << (heads.bit_length() - 1)
    return _geometric(below) + _geometric(2 * below)[::2][: heads - below]


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * i / heads) for i in range(1, heads + 1)]


class DistanceBias:
    """A FlexAttention ``score_mod`` that subtracts slope x distance, which others can spell out."""

    def __init__(
        self,
        slopes: torch.Tensor,
        queries: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> None:
        """Of the heads that queries come with.

        Args:
            slopes: float32 (N,).
            queries, keys: int64, places of all queries and keys in their sequence; both or neither.
        """
        self.slopes, self.queries, self.keys = slopes, queries, keys

    def __call__(
        self,
        score: torch.Tensor,
        batch: torch.Tensor,
        head: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        """The score of one query and key, biased."""
        if self.queries is not None and self.keys is not None:
            query, key = self.queries[query], self.keys[key]
        return score + self.slopes[head] * (key - query)

    def rows(self, start: int, stop: int, keys: int) -> torch.Tensor:
        """The bias of queries ``start:stop`` as a tensor: float32 (N, stop - start, keys)."""
        device = self.slopes.device
        if self.queries is not None and self.keys is not None:
            distances = self.keys[:keys] - self.queries[start:stop, None]
        else:
            queries = torch.arange(start, stop, device=device)
            distances = torch.arange(keys, device=device) - queries[:, None]
        return self.slopes[:, None, None] * distances
