"""Problems and answers for the vocabulary loss, and a meter of what it holds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.tokens import IGNORED
from kernels import row_blocks

HUGE = 1e20
"""HUGE * HUGE is inf in float32 and finite in float64."""


@dataclass(frozen=True)
class Problem:
    """What every rank knows; each computes with its own part.

    Attributes:
        layout: of the vocabulary.
        hidden: (n, H) of each rank, float64.
        targets: int64 (n,) of each rank.
        weight: (vocabulary, H), float64.
    """

    layout: VocabularyLayout
    hidden: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    weight: torch.Tensor

    def shard(self, q: int, dtype: torch.dtype) -> torch.Tensor:
        """The compute shard of ring rank ``q``."""
        return torch.cat([self.weight[list(piece)] for piece in self.layout.pieces(q)]).to(dtype)

    @property
    def scale(self) -> float:
        """One over the number of tokens that count."""
        return 1.0 / max(1, sum(int((t != IGNORED).sum()) for t in self.targets))


def make_problem(
    layout: VocabularyLayout,
    tokens: Sequence[int],
    *,
    hidden: int = 6,
    ignored: Sequence[float] | None = None,
    minus_infinity: int | None = None,
    seed: int = 0,
) -> Problem:
    """Random numbers, representable in bfloat16 so that every dtype means the same problem.

    Args:
        layout: of the vocabulary.
        tokens: of each rank.
        hidden: width.
        ignored: the share of ignored tokens of each rank; a quarter by default.
        minus_infinity: FSDP rank in whose columns every third token's logits are -inf in float32.
        seed: of the numbers.
    """
    random = torch.Generator().manual_seed(seed)
    shares = ignored if ignored is not None else [0.25] * len(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).bfloat16().double()

    states, targets = [], []
    for count, share in zip(tokens, shares, strict=True):
        states.append(draw(count, hidden))
        target = torch.randint(layout.vocabulary, (count,), generator=random)
        target[torch.rand(count, generator=random) < share] = IGNORED
        targets.append(target)
    weight = draw(layout.vocabulary, hidden) * 2
    if minus_infinity is not None:
        lost = layout.shard(minus_infinity)
        weight[:, 0] = 0
        weight[list(lost), 0] = -HUGE
        for state, target in zip(states, targets, strict=True):
            state[:, 0] = 0
            state[::3, 0] = HUGE
            target[::3] = torch.where(
                (target[::3] >= lost.start) & (target[::3] < lost.stop), IGNORED, target[::3]
            )
    return Problem(layout, tuple(states), tuple(targets), weight)


@dataclass(frozen=True)
class Answer:
    """Of one rank: -log p summed, dX (n, H), dW of its compute shard; log p and entropy (n,), None
    where a schedule does not give them."""

    loss: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    log_p: torch.Tensor | None
    entropy: torch.Tensor | None


def answer(problem: Problem, ring: Sequence[int], q: int) -> Answer:
    """By the definition, in float64, for the tokens of the ranks ``ring`` and no others."""
    weight = problem.weight.clone().requires_grad_()
    for place, rank in enumerate(ring):
        hidden = problem.hidden[rank].clone().requires_grad_()
        target = problem.targets[rank]
        log_p = torch.log_softmax(hidden @ weight.t(), 1)
        entropy = -(log_p.exp() * log_p).sum(1) * (target != IGNORED)
        picked = log_p.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1) * (target != IGNORED)
        (-picked.sum() * problem.scale).backward()
        if place == q:
            mine = -picked.sum().detach(), hidden.grad, picked.detach(), entropy.detach()
    assert weight.grad is not None
    rows = [row for piece in problem.layout.pieces(q) for row in piece]
    loss, dx, log_p, entropy = mine
    return Answer(loss, dx, weight.grad[rows], log_p, entropy)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``|found - expected| / |expected|``, columns that hold multiples of HUGE divided by it."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if expected.numel() == 0:
        return 0.0
    unit = torch.where(expected.abs() > HUGE**0.5, HUGE, 1.0)
    if expected.dim() == 2:
        unit = unit.amax(0)
    norm = (expected / unit).norm().item()
    return ((found.double() - expected) / unit).norm().item() / (norm or 1.0)


class Meter(TorchDispatchMode):
    """Counts the largest tensor and how many tensors of at least ``large`` numbers live at once."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.largest = 0
        self.most = 0
        self._large = large
        self._alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        numbers = storage.nbytes() // tensor.element_size()
        self.largest = max(self.largest, numbers)
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
        if numbers >= self._large:
            ref = StorageWeakRef(storage)
            self._alive[ref.cdata] = ref
            self.most = max(self.most, len(self._alive))


@contextmanager
def small_blocks(numbers: int) -> Iterator[None]:
    """Work in plain torch on no more than ``numbers`` numbers at a time."""
    usual = row_blocks.ELEMENTS
    row_blocks.ELEMENTS = numbers
    try:
        yield
    finally:
        row_blocks.ELEMENTS = usual
