"""Gradients of weighed experts without their outputs, against plain autograd."""

from functools import partial

import pytest
import torch

from components.expert_dispatch.last_product import ExpertRuns, expert_gradients
from components.titan.experts import LAST, parts_of
from tests.unit.experts_support import DIM, build, config_of

COUNTS = torch.tensor([3, 0, 7, 1, 0, 9, 2, 4])
DTYPES = {"glm": torch.float64, "moe": torch.bfloat16}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, gradients of outputs, and weights, one of which is 0."""
    draw = torch.Generator().manual_seed(0)
    n = int(COUNTS.sum())
    rows, pull = (torch.randn(n, DIM, generator=draw).to(dtype) for _ in range(2))
    weights = torch.rand(n, generator=draw)
    weights[4] = 0
    return rows, pull, weights


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", DTYPES)
@pytest.mark.parametrize("frozen", ["", "w1_EFD", LAST, "x", "x w1_EFD w2_EDF w3_EFD"])
def test_every_gradient_is_that_of_the_weighed_outputs(
    family: str, frozen: str, keep: bool
) -> None:
    experts = build(config_of(family), DTYPES[family]).inner_experts
    rows, pull, weights = inputs(DTYPES[family])
    x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, COUNTS)
    (out.float() * w[:, None] if family == "moe" else out * w[:, None].double()).to(
        out.dtype
    ).backward(pull)
    named = dict(experts.named_parameters())
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        runs = ExpertRuns(parts=parts_of(experts), weights=named, ends=COUNTS.cumsum(0).int())
        products = runs.gate_and_up(rows)
        assert torch.equal(runs.outputs(*products), out)
        of_rows, of_weights = expert_gradients(
            runs,
            rows.clone,
            pull.clone,
            weights,
            {name: partial(found.__setitem__, name) for name in named.keys() - frozen.split()},
            kept=products if keep else None,
            of_rows="x" not in frozen,
        )
    assert found.keys() == named.keys() - frozen.split()
    pairs = [(gradient, named[name].grad) for name, gradient in found.items()]
    pairs.append((of_weights.to(w.dtype), w.grad))
    if "x" in frozen:
        assert of_rows is None
    else:
        pairs.append((of_rows, x.grad))
    for gradient, plain in pairs:
        assert gradient.shape == plain.shape and gradient.dtype == plain.dtype
        error = (gradient - plain).norm() / plain.norm()
        assert error < (1e-6 if family == "glm" else 8e-3)


def test_experts_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="routed experts are Linear.*legal: "):
        parts_of(torch.nn.Linear(2, 2))
