"""Run a part of a layer a piece at a time, with nothing but its input kept for backward.

Forward runs the pieces without a graph. Backward takes them from the last to the first: each runs
once more, now with a graph, is differentiated, and its graph is gone before the next begins. So a
part runs exactly twice, and what it needs to be differentiated is that of one piece.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn as nn

from components.models.glm_flash.chunked.pieces import Piece
from components.recompute.tape import choice, output
from kernels.precision import accumulation_dtype


class Outcome(NamedTuple):
    """What a piece makes.

    Attributes:
        rows: (tokens of the piece, D).
        state: what the next piece goes on from, if the piece's last document continues there.
        choice: (tokens of the piece, n), discrete decisions, in forward.
    """

    rows: torch.Tensor
    state: torch.Tensor | None = None
    choice: torch.Tensor | None = None


class Part:
    """One call of a part of a layer. Subclasses say how a piece of it runs.

    A part draws no random numbers. Modules that FSDP shards in a group of their own are called
    without hooks: FSDP counts their runs and orders its exchanges by them, and a run inside
    backward is none that it knows of. Their parameters are gathered while the layer runs.

    Attributes:
        module: whose parameters take part.
        pieces: of the tokens, first to last.
    """

    reach: int = 0
    """Rows before a piece that it reads as well, where they belong to its first document."""

    stateful: ClassVar[bool] = False
    """Whether a document that is cut hands a state from piece to piece."""

    chooses: ClassVar[bool] = False
    """Whether pieces make discrete decisions, which backward must not make again."""

    def __init__(self, module: nn.Module, pieces: Sequence[Piece]) -> None:
        self.module = module
        self.pieces = pieces

    def shared(self, x: torch.Tensor, choosing: bool) -> tuple[torch.Tensor, ...]:
        """What all pieces read, made of the whole input; gradients of it are summed over pieces.

        Args:
            x: (T, D).
            choosing: whether the pieces will make their decisions (forward), or get them.
        """
        return ()

    def run(
        self,
        piece: Piece,
        x: torch.Tensor,
        shared: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        choice: torch.Tensor | None,
    ) -> Outcome:
        """Run one piece.

        Args:
            x: the piece's rows of the input, with up to ``reach`` rows before them.
            shared: from ``shared``.
            state: from the piece before, if the first document began there.
            choice: what the same piece chose in forward, in backward.
        """
        raise NotImplementedError

    def source(self, piece: Piece) -> slice:
        """The rows of the input that a piece reads."""
        return slice(piece.begin - min(self.reach, piece.ahead), piece.stop)

    @property
    def hands_on(self) -> bool:
        """Whether any state passes from piece to piece in this call."""
        return self.stateful and any(piece.continued for piece in self.pieces)


def run_in_pieces(part: Part, x: torch.Tensor) -> torch.Tensor:
    """The part's result for ``x`` (T, D): (T, D').

    Gradients of parameters are those of each piece, summed in full precision and rounded once.
    """
    return _InPieces.apply(part, x, *part.module.parameters())


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Part, x: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        made: list[_Forward] = []

        def run() -> torch.Tensor:
            made.append(_run_forward(part, x))
            return made[0].out

        # In a layer's second run these come from the tape, and nothing runs.
        out = output(run)
        kept = []
        if part.hands_on:
            # Small beside the output, so they stay on the device as choices do.
            kept.append(choice(lambda: torch.stack(made[0].states)))
        if part.chooses:
            kept.append(choice(lambda: torch.cat(made[0].choices)))
        ctx.save_for_backward(x, *kept)
        ctx.part = part
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        states = kept.pop(0) if ctx.part.hands_on else None
        choices = kept.pop(0) if ctx.part.chooses else None
        _, of_x, *of_parameters = ctx.needs_input_grad
        backward = _Backward(ctx.part, x, of_x, of_parameters)
        return None, *backward.run(grad_out, states, choices)


class _Forward(NamedTuple):
    out: torch.Tensor
    states: list[torch.Tensor]
    choices: list[torch.Tensor]


def _run_forward(part: Part, x: torch.Tensor) -> _Forward:
    shared = part.shared(x, choosing=True)
    out, states, choices = None, [], []
    state: torch.Tensor | None = None
    for piece in part.pieces:
        entering = state if piece.continued else None
        if entering is not None:
            states.append(entering)
        rows, state, chosen = part.run(piece, x[part.source(piece)], shared, entering, None)
        if chosen is not None:
            choices.append(chosen)
        if out is None:
            out = rows.new_empty(len(x), *rows.shape[1:])
        out[piece.rows] = rows
    assert out is not None
    return _Forward(out, states, choices)


class _Backward:
    """The gradients of one call, as far as the pieces have come."""

    def __init__(
        self, part: Part, x: torch.Tensor, of_x: bool, of_parameters: Sequence[bool]
    ) -> None:
        self.part, self.x = part, x
        self.grad_x = torch.zeros_like(x) if of_x else None
        self.parameters = tuple(part.module.parameters())
        self.wanted = [i for i, wanted in enumerate(of_parameters) if wanted]
        self.totals: list[torch.Tensor | None] = [None] * len(of_parameters)

    def run(
        self,
        grad_out: torch.Tensor,
        states: torch.Tensor | None,
        choices: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input and of every parameter; None where none is wanted or used."""
        whole = self._leaf(self.x)
        with torch.enable_grad():
            made = self.part.shared(whole, choosing=False)
        shared = tuple(t.detach().requires_grad_(t.requires_grad) for t in made)
        to_shared = [torch.zeros_like(t) for t in shared if t.requires_grad]
        to_state: torch.Tensor | None = None
        entering: list[torch.Tensor] = [] if states is None else list(states.unbind())
        for piece in reversed(self.part.pieces):
            state = None
            if self.part.stateful and piece.continued:
                state = entering.pop().detach().requires_grad_()
            chosen = None if choices is None else choices[piece.rows]
            pulls = grad_out[piece.rows], to_state
            to_state = self._run_piece(piece, shared, to_shared, state, chosen, pulls)
        if to_shared:
            roots = [t for t in made if t.requires_grad]
            self._add(roots, to_shared, whole, slice(None))
        cast = (
            None if total is None else total.to(p.dtype)
            for total, p in zip(self.totals, self.parameters, strict=True)
        )
        return self.grad_x, *cast

    def _run_piece(
        self,
        piece: Piece,
        shared: tuple[torch.Tensor, ...],
        to_shared: list[torch.Tensor],
        state: torch.Tensor | None,
        chosen: torch.Tensor | None,
        pulls: tuple[torch.Tensor, torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Add a piece's gradients; returns that of the state it goes on from."""
        source = self.part.source(piece)
        x = self._leaf(self.x[source])
        with torch.enable_grad():
            done = self.part.run(piece, x, shared, state, chosen)
        roots, grads = [done.rows], [pulls[0]]
        if done.state is not None and pulls[1] is not None:
            roots.append(done.state)
            grads.append(pulls[1])
        del done
        others = [t for t in (*shared, state) if t is not None and t.requires_grad]
        found = self._add(roots, grads, x, source, others)
        for total, grad in zip(to_shared, found, strict=False):
            if grad is not None:
                total += grad
        return found[-1] if state is not None else None

    def _add(
        self,
        roots: list[torch.Tensor],
        grads: list[torch.Tensor],
        x: torch.Tensor,
        rows: slice,
        others: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor | None]:
        """Differentiate; add up the gradients of input and parameters, return those of others."""
        of_x = [] if self.grad_x is None else [x]
        parameters = [self.parameters[i] for i in self.wanted]
        inputs = [*others, *of_x, *parameters]
        found: list[torch.Tensor | None] = [
            *torch.autograd.grad(roots, inputs, grads, allow_unused=True)
        ]
        for index in reversed(self.wanted):
            self._add_to_parameter(index, found.pop())
        if self.grad_x is not None:
            grad = found.pop()
            if grad is not None:
                self.grad_x[rows] += grad
        return found

    def _add_to_parameter(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        total = self.totals[index]
        if total is None:
            total = torch.zeros_like(grad, dtype=accumulation_dtype(grad.dtype))
        self.totals[index] = total.add_(grad)

    def _leaf(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_(self.grad_x is not None)
