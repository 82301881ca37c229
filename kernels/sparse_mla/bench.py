"""Runs forms of the kernels on a GPU for ``kernels.sparse_mla.tune``: right, and how fast."""

from functools import cached_property
from typing import Any

import torch

from kernels.sparse_mla import naive, tuned
from kernels.sparse_mla.inputs import Inputs, draw_inputs
from kernels.sparse_mla.shape import Shape
from kernels.sparse_mla.tilelang_backward import backward
from kernels.sparse_mla.tilelang_forward import forward
from kernels.sparse_mla.tune import Plan

KEYS = 2048
"""Keys per query in pools, as published."""

GATE = (1, 2, 3, 4, 5, 63, 64, 65, 301, 2500)
"""Tokens of the documents on which a form is held against the twin."""

TIMED = (16_384,)
REPEATS = 5

Results = dict[str, torch.Tensor]
"""By name: out and lse, or dq, dlatent and mass."""


class Problem:
    """Inputs of a shape, and what is asked of them more than once."""

    def __init__(self, shape: Shape, lengths: tuple[int, ...], device: str) -> None:
        self.inputs = draw_inputs(
            lengths, heads=shape.heads, width=shape.width, tail=shape.tail, size=shape.size,
            count=KEYS // shape.size, device=device,
        )  # fmt: skip
        self.settings: dict[str, Any] = {
            "size": shape.size, "scale": shape.scale, "tail": shape.tail,
        }  # fmt: skip

    @cached_property
    def exact(self) -> Results:
        """The twin's, in float32."""
        return self._twin(self.inputs.cast(torch.float32), True)

    @cached_property
    def rough(self) -> Results:
        """The twin's, in bfloat16 throughout."""
        return self._twin(self.inputs, False)

    def _twin(self, inputs: Inputs, upcast: bool) -> Results:
        out, lse = naive.forward_reference(*inputs[:5], **self.settings, upcast=upcast)
        dq, dlatent, mass = naive.backward_reference(*inputs, **self.settings, upcast=upcast)
        return {"out": out, "lse": lse, "dq": dq, "dlatent": dlatent, "mass": mass}

    @cached_property
    def attended(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of the listed forward, which every backward starts from."""
        return forward(*self.inputs[:5], **self.settings)

    def run(self, plan: Plan, probabilities: bool) -> Results:
        """One call of a form."""
        given, settings = self.inputs[:5], self.settings
        if plan.direction == "forward":
            with tuned.trying(plan.direction, plan.variant, plan.options):
                out, lse = forward(*given, variant=plan.variant, **settings)
            return {"out": out, "lse": lse}
        dlatent = torch.zeros_like(self.inputs.latent, dtype=torch.float32)
        arguments = *given, *self.attended, self.inputs.grad, dlatent
        with tuned.trying(plan.direction, plan.variant, plan.options):
            dq, mass = backward(
                *arguments, variant=plan.variant, probabilities=probabilities, **settings
            )
        found = {"dq": dq, "dlatent": dlatent}
        return found if mass is None else {**found, "mass": mass}


class OnGpu:
    """See ``kernels.sparse_mla.tune.Bench``.

    Args:
        device: of the inputs.
        gate: tokens of the documents on which forms are held against the twin.
        timed: of those on which they are timed.
    """

    def __init__(
        self,
        device: str = "cuda",
        gate: tuple[int, ...] = GATE,
        timed: tuple[int, ...] = TIMED,
    ) -> None:
        self._device, self._gate, self._timed = device, gate, timed
        self._made: dict[tuple[Shape, tuple[int, ...]], Problem] = {}

    def wrong(self, plan: Plan, shape: Shape, probabilities: bool) -> str | None:
        """See ``Bench.wrong``: off by more than twice what plain torch in bfloat16 is."""
        problem = self._problem(shape, self._gate)
        for name, tensor in problem.run(plan, probabilities).items():
            right, rough = (_finite(x[name]) for x in (problem.exact, problem.rough))
            allowed = 2 * (rough - right).abs().max().item() + 1e-4
            error = (_finite(tensor) - right).abs().max().item()
            # No comparison with nan is true.
            if not error <= allowed:
                return f"{name} is off by {error:.2e} where {allowed:.2e} is allowed"
        return None

    def milliseconds(self, plan: Plan, shape: Shape) -> float:
        """See ``Bench.milliseconds``: the median of ``REPEATS`` calls after two."""
        problem, times = self._problem(shape, self._timed), []
        for _ in range(2 + REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            problem.run(plan, False)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return sorted(times[2:])[REPEATS // 2]

    def _problem(self, shape: Shape, lengths: tuple[int, ...]) -> Problem:
        if (shape, lengths) not in self._made:
            self._made[shape, lengths] = Problem(shape, lengths, self._device)
        return self._made[shape, lengths]


def _finite(x: torch.Tensor) -> torch.Tensor:
    """In float32; the logarithm of nothing, -inf, is taken for 0."""
    x = x.float()
    return x.masked_fill(x == float("-inf"), 0)
