"""Runs forms of the kernels on a GPU for ``kernels.sparse_mla.tune``: right, and how fast."""

from functools import cached_property
from typing import Any, NamedTuple

import torch

from kernels.packed import bounds
from kernels.sparse_mla import naive, tuned
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


class Inputs(NamedTuple):
    """Arguments of both kernels, in the order of the twin's backward."""

    q: torch.Tensor
    latent: torch.Tensor
    pools: torch.Tensor
    position: torch.Tensor
    start: torch.Tensor
    grad: torch.Tensor


def make(shape: Shape, lengths: tuple[int, ...], device: torch.device) -> Inputs:
    """Random inputs, one query per token; pools are chosen at random among the complete ones."""
    random = torch.Generator(device=device).manual_seed(0)
    position = torch.cat([torch.arange(n, device=device) for n in lengths])
    counts = torch.tensor(lengths, device=device)
    start = torch.tensor(bounds(lengths)[:-1], device=device).repeat_interleave(counts)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random, device=device).bfloat16()

    tokens, columns = len(position), shape.width + shape.tail
    return Inputs(
        draw(tokens, shape.heads, columns),
        draw(tokens, columns),
        _pools(position, KEYS // shape.size, shape.size, random),
        position,
        start,
        draw(tokens, shape.heads, shape.width),
    )


def _pools(position: torch.Tensor, count: int, size: int, random: torch.Generator) -> torch.Tensor:
    """int32 (Q, n): at most ``count`` complete pools of each query, ascending, then -1."""
    pools = max(1, int(position.max() + 1) // size)
    noise = torch.rand(len(position), pools, generator=random, device=position.device)
    column = torch.arange(pools, device=position.device)
    open_ = column < ((position + 1) // size).unsqueeze(1)
    best = noise.masked_fill_(~open_, -1.0).topk(min(count, pools), dim=1)
    ids = torch.where(best.values >= 0, best.indices, pools).sort(1).values
    return torch.where(ids < pools, ids, -1).int()


class Problem:
    """Inputs of a shape, and what is asked of them more than once."""

    def __init__(self, shape: Shape, lengths: tuple[int, ...], device: torch.device) -> None:
        self.inputs = make(shape, lengths, device)
        self.settings: dict[str, Any] = {
            "size": shape.size, "scale": shape.scale, "tail": shape.tail,
        }  # fmt: skip

    @cached_property
    def exact(self) -> Results:
        """The twin's, in float32."""
        wide = (x.float() if x.is_floating_point() else x for x in self.inputs)
        return self._twin(Inputs(*wide), True)

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
        self._device, self._gate, self._timed = torch.device(device), gate, timed
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
