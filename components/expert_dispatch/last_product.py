"""Gradients of experts whose outputs are weighed, without the outputs.

Of ``weights[i] * (hidden(rows) @ last.T)[i]``, summed with ``pull[i]``. The last product is not
run: with ``back = pull @ last``, the gradient of a row's weight is ``<hidden, back>``, and that of
``hidden`` is ``weight * back``. Products are made one at a time, each operand is let go of after
its last, and the gradient of one parameter exists at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from components.titan.experts import GATE, LAST, UP, Parts
from kernels.expert_rows.op import swiglu, swiglu_gradients_, weigh_
from kernels.grouped_mm import grouped_mm_by_columns, grouped_outer

Weights = Mapping[str, torch.Tensor]
"""By the names of the parameters; each (experts, ...), of any number of experts."""

GateAndUp = tuple[torch.Tensor, torch.Tensor]
"""The first two products of some rows, (R, F) each."""

Take = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ExpertRuns:
    """Some experts and the rows that they run on; R may be 0.

    The same in forward and backward but for what the rows hold.
    """

    parts: Parts

    weights: Weights

    ends: torch.Tensor
    """Of the experts' rows, int32 (experts,)."""

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
    add: Mapping[str, Callable[[torch.Tensor], None]],
    *,
    kept: GateAndUp | None = None,
    of_rows: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Run some experts up to their last product, and differentiate.

    Args:
        take_rows: makes the rows, sorted by expert, (R, D); called once.
        take_pull: makes the gradients of their weighed outputs, (R, D), which are overwritten.
        weights: (R,).
        add: by parameter, takes its gradient, of the dtype of the parameter; others get none.
        kept: what ``runs.gate_and_up`` returned for these rows, to be used instead of calling it.
            Overwritten.
        of_rows: whether gradients of rows are wanted.

    Returns:
        Gradients of rows (R, D) or None, and of weights (R,) in full precision.
    """
    rows = None
    if kept is None:
        rows = runs.given(take_rows())
        kept = runs.gate_and_up(rows)
    gate, up = kept
    del kept
    pull = take_pull()
    dtype, pull = pull.dtype, runs.given(pull)
    back = grouped_mm_by_columns(pull, runs.weight(LAST), runs.ends)
    hidden, of_weights = swiglu_gradients_(gate, up, back, weights, runs.parts.limit)
    del back
    if LAST in add:
        weigh_(pull, weights)
        _add(add, runs, LAST, pull, hidden)
    del pull, hidden
    if GATE in add or UP in add:
        rows = runs.given(take_rows()) if rows is None else rows
        _add(add, runs, GATE, gate, rows)
        _add(add, runs, UP, up, rows)
    del rows
    if not of_rows:
        return None, of_weights
    total = grouped_mm_by_columns(gate, runs.weight(GATE), runs.ends)
    total += grouped_mm_by_columns(up, runs.weight(UP), runs.ends)
    return total.to(dtype), of_weights


def _add(
    add: Mapping[str, Callable[[torch.Tensor], None]],
    runs: ExpertRuns,
    name: str,
    pull: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    if name in add:
        add[name](grouped_outer(pull, rows, runs.ends).to(runs.weights[name].dtype))
