"""Gradients of experts whose outputs are weighed, without the outputs."""

from collections.abc import Mapping, Sequence

import torch

from components.titan.experts import LAST, Hidden
from kernels.grouped_mm import grouped_mm_by_columns, grouped_outer
from kernels.precision import accumulation_dtype
from kernels.row_blocks import row_blocks


class ExpertGradients:
    """Of ``weights[i] * (hidden(rows) @ last.T)[i]``, summed with ``pull[i]``.

    The last product is not run: with ``back = pull @ last``, the gradient of a row's weight is
    ``<hidden, back>``, and that of ``hidden`` is ``weight * back``.

    Attributes:
        of_rows: (R, D), or None if not wanted.
        of_weights: (R,), in full precision.
        of_parameters: those wanted, in the order of their names.
    """

    def __init__(
        self,
        hidden: Hidden,
        parameters: Mapping[str, torch.Tensor],
        wanted: Sequence[bool],
        rows: tuple[torch.Tensor, bool],
        counts: torch.Tensor,
        pull: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """
        Args:
            hidden: see ``Hidden``.
            parameters: by name.
            wanted: by parameter.
            rows: sorted by expert, (R, D), and whether their gradients are wanted.
            counts: rows of each expert, int64 (experts,).
            pull: gradients of the weighed outputs, (R, D).
            weights: (R,).
        """
        ends = counts.cumsum(0).int()
        leaf = rows[0].detach().requires_grad_(rows[1])
        leaves = {
            name: parameter.detach().requires_grad_(wish and name != LAST)
            for (name, parameter), wish in zip(parameters.items(), wanted, strict=True)
        }
        with torch.enable_grad():
            value = hidden(leaf, leaves, ends)
        kept, last = value.detach(), parameters[LAST].detach()
        pull = pull.to(kept.dtype)
        back = grouped_mm_by_columns(pull, last.to(kept.dtype), ends)
        self.of_weights = _weigh(kept, back, weights)
        of_last = []
        if dict(zip(parameters, wanted, strict=True))[LAST]:
            of_last = [grouped_outer(_weighed(pull, weights), kept, ends).to(last.dtype)]
        del pull
        inputs = [tensor for tensor in (leaf, *leaves.values()) if tensor.requires_grad]
        found = iter(torch.autograd.grad(value, inputs, back) if inputs else ())
        self.of_rows = next(found) if rows[1] else None
        self.of_parameters = [
            of_last.pop() if name == LAST else next(found)
            for name, wish in zip(parameters, wanted, strict=True)
            if wish
        ]


def _weigh(hidden: torch.Tensor, back: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weigh ``back`` in place; the gradients of the weights (R,)."""
    wide = accumulation_dtype(back.dtype)
    gradients = back.new_empty(len(back), dtype=wide)
    for block in row_blocks(*back.shape):
        part = back[block].to(wide)
        gradients[block] = (hidden[block].to(wide) * part).sum(1)
        back[block] = part * weights[block, None].to(wide)
    return gradients


def _weighed(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    wide, out = accumulation_dtype(rows.dtype), torch.empty_like(rows)
    for block in row_blocks(*rows.shape):
        out[block] = rows[block].to(wide) * weights[block, None].to(wide)
    return out
