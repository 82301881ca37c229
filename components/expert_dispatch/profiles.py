"""Routing that depends on nothing but a token's position, as unbalanced as one likes.

For benchmarks and dry runs: memory and time under a known imbalance, before a router has learned
any.
"""

import re
from dataclasses import dataclass

import torch

_PATTERN = re.compile(r"([1-9][0-9]?|100)/([1-9][0-9]*)")

BALANCED = "balanced"


@dataclass(frozen=True, slots=True)
class RoutingProfile:
    """A share of the tokens that visits a few hot experts, the rest spread over the others.

    Of N tokens of a rank the first floor(N x percent / 100) are hot: route j of k goes to expert
    j mod hot. Route j of another token i goes to hot + (i + j) mod (E - hot). Without hot experts
    that is (i + j) mod E: every expert gets as many routes.
    """

    percent: int
    """Hot tokens, of 100."""

    hot: int
    """Hot experts: 0 to hot - 1."""

    @classmethod
    def parse(cls, text: str) -> "RoutingProfile":
        """Read "balanced", or "percent/experts" like "80/16".

        Raises:
            ValueError: it is neither.
        """
        if text == BALANCED:
            return cls(0, 0)
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"routing_profile is {text!r}; legal: {BALANCED!r}, or percent of the tokens / "
                "experts that these visit, as in '80/16': 1 to 100 percent, 1 expert or more"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.percent}/{self.hot}" if self.hot else BALANCED

    def problem(self, experts: int) -> str:
        """Why so many experts per layer cannot be routed to like this; "" if they can."""
        others = experts - self.hot
        if others < 0:
            return f"{self.hot} hot experts are more than the {experts} of a layer"
        if not others and self.percent < 100:
            return f"all {experts} experts of a layer are hot: none is left for the other tokens"
        return ""

    def repeats(self, top_k: int, experts: int) -> bool:
        """Whether a token may visit an expert more than once."""
        others = experts - self.hot
        return (self.percent > 0 and self.hot < top_k) or (self.percent < 100 and others < top_k)

    def expert_ids(
        self, tokens: int, top_k: int, experts: int, device: torch.device | str
    ) -> torch.Tensor:
        """The experts that every token visits, in the order of its routes.

        Args:
            tokens: N, of one rank.
            top_k: routes of a token, k.
            experts: of the layer, E.

        Returns:
            int64 (N, k).

        Raises:
            ValueError: ``problem`` has something to say about ``experts``.
        """
        problem = self.problem(experts)
        if problem:
            raise ValueError(f"routing profile {str(self)!r}: {problem}")
        token = torch.arange(tokens, device=device).unsqueeze(1)
        route = torch.arange(top_k, device=device)
        # Without others, or without hot ones, the divisor of the side that nobody takes is 1.
        rest = self.hot + (token + route) % max(experts - self.hot, 1)
        hot = route % max(self.hot, 1)
        return torch.where(token < tokens * self.percent // 100, hot, rest)
