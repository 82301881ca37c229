"""States of a linear recurrence across parts of a batch, from one summary of each part.

What a part leaves is affine in what enters it: out = A in + B, per head, with A (dk, dk) and B
(dk, dv). A part that ends inside a document hands ``out`` on to the next; if it also began inside
that document, A counts. So all parts' (A, B) give the state that enters every part, in forward. In
backward, with C the gradient of a part's entering state through its own outputs, gradients pass the
other way by the transposed map: to_in = C + A^T to_out.
"""

from collections.abc import Sequence

import torch

from components.context_parallel.collectives import Direction, Link, collect
from components.context_parallel.layout import Layout
from components.models.glm_flash.chunked.pieces import Piece


def passes_through(part: Piece) -> bool:
    """Whether a part lies inside one document, so that what enters it also leaves it."""
    return part.continued and part.carries and len(part.lengths) == 1


class StateChain:
    """The parts of a batch, each with one summary (H, dk, dv + dk): B or C, and A beside it."""

    def __init__(self, layout: Layout, link: Link) -> None:
        self._layout, self._link = layout, link
        self._held = layout.held(link.rank)

    def entering(self, offsets: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
        """The states that enter this rank's parts.

        Args:
            offsets: B of each of this rank's parts, (parts, H, dk, dv).
            maps: A of each, (parts, H, dk, dk).

        Returns:
            (parts, H, dk, dv); zeros where no document goes on.
        """
        parts, (all_offsets, all_maps) = self._layout.parts, self._gather(offsets, maps, "forward")
        states = [torch.zeros_like(all_offsets[0])]
        for part, offset, matrix in zip(parts, all_offsets, all_maps, strict=True):
            left = torch.zeros_like(offset)
            if passes_through(part):
                left = torch.baddbmm(offset, matrix, states[-1])
            elif part.carries:
                left = offset
            states.append(left)
        return self._own(states)

    def leaving(self, gradients: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
        """Gradients of the states that this rank's parts leave.

        Args:
            gradients: C of each of this rank's parts, (parts, H, dk, dv).
            maps: A of each.

        Returns:
            (parts, H, dk, dv); zeros where no document goes on.
        """
        parts, (own, all_maps) = self._layout.parts, self._gather(gradients, maps, "backward")
        pulls = [torch.zeros_like(own[0])]
        for part, gradient, matrix in zip(
            reversed(parts), reversed(own), reversed(all_maps), strict=True
        ):
            # What enters this part is what the part before it left. Where nothing enters, no output
            # depends on it, and the gradient is zero already.
            if passes_through(part):
                gradient = torch.baddbmm(gradient, matrix.mT, pulls[-1])
            pulls.append(gradient)
        return self._own(pulls[::-1][1:])

    def _own(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([states[p] for p in self._held])

    def _gather(
        self, values: torch.Tensor, maps: torch.Tensor, direction: Direction
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Of all parts, in the order of the batch."""
        order = self._layout.order_of([1] * len(self._layout.parts))
        summary = torch.cat([values, maps], -1)
        everyone = collect(summary, order, self._link, "kda.states", direction)
        width = values.shape[-1]
        return everyone[..., :width].unbind(), everyone[..., width:].unbind()
