"""Gradients of experts whose outputs are weighed, without the outputs.

Of ``weights[i] * (hidden(rows) @ last.T)[i]``, summed with ``pull[i]``. The last product is not
run: with ``back = pull @ last``, the gradient of a row's weight is ``<hidden, back>``, and that of
``hidden`` is ``weight * back``. Products are made one at a time, each operand is let go of after
its last, and the gradient of one parameter exists at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from components.titan.experts import GATE, LAST, UP, Parts
from kernels.expert_rows.op import swiglu, swiglu_gradients_, weigh_
from kernels.grouped_mm import grouped_mm_by_columns, grouped_outer
from kernels.precision import accumulation_dtype
from kernels.products import add_product, multiply

Weights = Mapping[str, torch.Tensor]
"""By the names of the parameters; each (experts, ...), of any number of experts."""

GateAndUp = tuple[torch.Tensor, torch.Tensor]
"""The first two products of some rows, (R, F) each."""

Take = Callable[[], torch.Tensor]

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""See ``kernels.products``."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ExpertRuns:
    """Some experts and the rows that they run on; R may be 0.

    The same in forward and backward but for what the rows hold.
    """

    parts: Parts

    weights: Weights

    ends: torch.Tensor
    """Of the experts' rows, int32 (experts,), where the rows are."""

    sizes: Sequence[int]
    """Rows of each expert; known to the host."""

    def gate_and_up(self, rows: torch.Tensor) -> GateAndUp:
        """Rows sorted by expert (R, D) -> both products (R, F)."""
        gate, up = (self._times(rows, name) for name in (GATE, UP))
        return gate, up

    def outputs(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """(R, F) twice -> (R, D)."""
        return self._times(swiglu(gate, up, self.parts.limit), LAST)

    def _times(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return self.parts.product(self.given(rows), self.weight(name), self.ends)

    def given(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the dtype that they are multiplied in."""
        return rows if self.parts.dtype is None else rows.to(self.parts.dtype)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter in the dtype that it is multiplied in."""
        return self.given(self.weights[name])


def expert_gradients(
    runs: ExpertRuns,
    take_rows: Take,
    take_pull: Take,
    weights: torch.Tensor,
    sums: Mapping[str, "ParameterSum"],
    *,
    kept: GateAndUp | None = None,
    of_rows: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Run some experts up to their last product, and differentiate.

    Args:
        take_rows: makes the rows, sorted by expert, (R, D). Called once for each use, so that they
            do not lie about in between: gathering them is cheap.
        take_pull: makes the gradients of their weighed outputs, (R, D), which are overwritten.
        weights: (R,).
        sums: by parameter, what its gradient is added to; others get none.
        kept: what ``runs.gate_and_up`` returned for these rows, to be used instead of calling it.
            Overwritten.
        of_rows: whether gradients of rows are wanted.

    Returns:
        Gradients of rows (R, D) or None, and of weights (R,) in full precision.
    """
    gate, up = kept or runs.gate_and_up(runs.given(take_rows()))
    pull = take_pull()
    dtype, pull = pull.dtype, runs.given(pull)
    hidden = grouped_mm_by_columns(pull, runs.weight(LAST), runs.ends)
    # From here on gate and up are their gradients.
    of_weights = swiglu_gradients_(gate, up, hidden, weights, runs.parts.limit)
    if LAST in sums:
        weigh_(pull, weights)
        sums[LAST].add(pull, hidden, runs)
    del pull, hidden
    if GATE in sums or UP in sums:
        rows = runs.given(take_rows())
        for name, gradient in ((GATE, gate), (UP, up)):
            if name in sums:
                sums[name].add(gradient, rows, runs)
        del rows
    if not of_rows:
        return None, of_weights
    total = grouped_mm_by_columns(gate, runs.weight(GATE), runs.ends)
    del gate
    total += grouped_mm_by_columns(up, runs.weight(UP), runs.ends)
    return total.to(dtype), of_weights


class ParameterSum:
    """The gradient of a parameter, (experts, out, in), summed over chunks in full precision; of one
    chunk, as a single product leaves it."""

    def __init__(self, like: torch.Tensor, *, single: bool, rounded: bool = False) -> None:
        """
        Args:
            like: the parameter.
            single: whether ``add`` is called once at most.
            rounded: to the dtype of the parameter after each call.
        """
        self._like, self._single = like, single
        self._dtype = like.dtype if rounded else accumulation_dtype(like.dtype)
        self._total: torch.Tensor | None = None

    def add(self, pull: torch.Tensor, rows: torch.Tensor, runs: ExpertRuns) -> None:
        """Add ``pull[e's rows].T @ rows[e's rows]`` for each expert e: (R, out) and (R, in)."""
        if self._single:
            self._total = grouped_outer(pull, rows, runs.ends).to(self._like.dtype)
            return
        # Product by product, so that each is added where it is made: the grouped kernel would round
        # all of them and leave them to be added in another pass.
        put: Product = add_product
        if self._total is None:
            self._total, put = torch.empty_like(self._like, dtype=self._dtype), multiply
        parts = zip(self._total, pull.split(runs.sizes), rows.split(runs.sizes), strict=True)
        for total, left, right in parts:
            put(total, left.t(), right)

    def total(self) -> torch.Tensor:
        """The sum; zeros if there was nothing."""
        return torch.zeros_like(self._like) if self._total is None else self._total

    def whole(self) -> torch.Tensor:
        """The sum in full precision, in one piece of memory."""
        return self.total().to(accumulation_dtype(self._like.dtype)).contiguous()
