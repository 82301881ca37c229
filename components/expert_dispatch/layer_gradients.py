"""The backward pass of one layer's experts, a chunk at a time."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import torch

from components.expert_dispatch.last_product import ParameterSum, expert_gradients
from components.expert_dispatch.layer_pass import LayerPass, Part
from components.expert_dispatch.rows import ChunkRows
from components.expert_dispatch.travel import Homeward, Outward
from components.expert_dispatch.weights import Return
from kernels.expert_rows.op import sum_places
from kernels.precision import accumulation_dtype

Kept = dict[int, list[torch.Tensor]]
"""By chunk, the first two products of its native part, then of its foreign part."""


class Gradients:
    """The gradients of one backward.

    Attributes:
        of_x, of_weights: None where not wanted.
        of_parameters: by parameter, after ``run``; None where not wanted.
    """

    def __init__(
        self,
        run: LayerPass,
        x: torch.Tensor | None,
        weights: torch.Tensor | None,
        wanted: Sequence[bool],
    ) -> None:
        """
        Args:
            x, weights: None where their gradients are not wanted.
            wanted: by parameter.
        """
        # Every row is one chunk's: plain assignment, no sum.
        self.of_x = None if x is None else _like(x)
        self.of_weights = None if weights is None else _like(weights)
        self.of_parameters: list[torch.Tensor | None] = [None] * len(wanted)
        self._run = run
        single, rounded = run.layer.partition.chunks == 1, run.around.rounded_sums
        # Native, then foreign.
        self._sums = [
            {
                name: ParameterSum(weight, single=single, rounded=rounded)
                for name, weight, wish in zip(run.names, shares, wanted, strict=True)
                if wish
            }
            for shares in (run.native, run.foreign_like)
        ]
        self._returns = self._returning()
        self._under_way: deque[tuple[str, Return]] = deque()

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        grad_out: torch.Tensor,
        kept: Kept,
    ) -> None:
        """All chunks; collective.

        Args:
            kept: emptied, chunk by chunk.
        """
        self._kept, run = kept, self._run
        given = x.contiguous(), grad_out.contiguous()
        run.in_turn(
            lambda index: run.send(index, given, weights),
            self._compute,
            self._give,
            self._land,
            self._send_home,
            # Those of which something is kept come first.
            backwards=True,
        )
        self._finish()

    def _compute(
        self, index: int, moves: ChunkRows, arriving: Outward
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        of_rows, of_weights = [], []
        kept = self._kept.pop(index, [])
        for part in self._run.parts(moves):
            rows, scores = self._of_part(part, arriving, kept)
            if rows is not None:
                of_rows.append(rows)
            of_weights.append(scores)
        return of_rows, of_weights

    def _of_part(
        self, part: Part, arriving: Outward, kept: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return expert_gradients(
            part.runs,
            partial(arriving.take, 0, part.rows),
            partial(arriving.take, 1, part.rows),
            arriving.weights(part.rows),
            self._sums[part.foreign],
            kept=(kept.pop(0), kept.pop(0)) if kept else None,
            of_rows=self.of_x is not None,
        )

    def _give(
        self,
        _: int,
        moves: ChunkRows,
        computed: tuple[list[torch.Tensor], list[torch.Tensor]],
    ) -> tuple[Homeward | None, Homeward | None]:
        # A rank that computed no row has its part in the exchanges all the same.
        of_rows, of_weights = computed
        return (
            None if self.of_x is None else self._run.send_home(moves, of_rows),
            None if self.of_weights is None else self._run.send_home(moves, of_weights),
        )

    def _land(
        self, index: int, moves: ChunkRows, leaving: tuple[Homeward | None, Homeward | None]
    ) -> None:
        tokens, (rows, scores) = self._run.tokens(index), leaving
        if rows is not None and self.of_x is not None:
            sum_places(rows.arrive(), moves.place, None, self.of_x[tokens])
            rows.close()
        if scores is not None and self.of_weights is not None:
            of_route = scores.arrive()[moves.place_of_route]
            self.of_weights[tokens] = of_route.to(self.of_weights.dtype)
            scores.close()

    def _returning(self) -> Iterator[tuple[str, Return]]:
        """Gradients of foreign experts, by parameter; each is sent when it is asked for."""
        run = self._run
        shares = dict(zip(run.names, run.native, strict=True))
        for name in list(self._sums[0]):
            total = self._sums[1].pop(name).whole() if run.migration.foreign else None
            yield from ((name, back) for back in run.migration.send_home(total, shares[name]))

    def _send_home(self) -> None:
        """The first gradients of foreign experts, while the last chunk's rows go home. The next
        follow as these are added up, so that two rounds exist at a time."""
        self._under_way.extend(islice(self._returns, 2))

    def _finish(self) -> None:
        """By parameter, with what other ranks computed."""
        run = self._run
        run.finish_fetch()
        for place, (name, own) in enumerate(zip(run.names, run.native, strict=True)):
            if name not in self._sums[0]:
                continue
            total = self._sums[0].pop(name).total()
            if run.migration.rounds > 1:
                # Rounded once all of them are added.
                total = total.to(accumulation_dtype(own.dtype))
            while self._under_way and self._under_way[0][0] == name:
                self._under_way.popleft()[1].add_to(total)
                self._under_way.extend(islice(self._returns, 1))
            self.of_parameters[place] = total.to(own.dtype)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
