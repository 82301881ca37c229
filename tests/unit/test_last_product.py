"""Gradients of weighed experts without their outputs, against plain autograd."""

import pytest
import torch

from components.expert_dispatch.last_product import ExpertGradients
from components.titan.experts import LAST, hidden_of
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


@pytest.mark.parametrize("family", DTYPES)
@pytest.mark.parametrize("frozen", ["", "w1_EFD", LAST, "x", "x w1_EFD w2_EDF w3_EFD"])
def test_every_gradient_is_that_of_the_weighed_outputs(family: str, frozen: str) -> None:
    experts = build(config_of(family), DTYPES[family]).inner_experts
    rows, pull, weights = inputs(DTYPES[family])
    x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, COUNTS)
    (out.float() * w[:, None] if family == "moe" else out * w[:, None].double()).to(
        out.dtype
    ).backward(pull)
    named = dict(experts.named_parameters())
    wanted = [name not in frozen.split() for name in named]
    found = ExpertGradients(
        hidden_of(experts), named, wanted, (rows, "x" not in frozen), COUNTS, pull, weights
    )
    expected = [named[name].grad for name, wish in zip(named, wanted, strict=True) if wish]
    pairs = list(zip(found.of_parameters, expected, strict=True))
    pairs.append((found.of_weights.to(w.dtype), w.grad))
    if "x" in frozen:
        assert found.of_rows is None
    else:
        pairs.append((found.of_rows, x.grad))
    for gradient, plain in pairs:
        assert gradient.shape == plain.shape and gradient.dtype == plain.dtype
        error = (gradient - plain).norm() / plain.norm()
        assert error < (1e-6 if family == "glm" else 8e-3)


def test_experts_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="routed experts are Linear.*legal: "):
        hidden_of(torch.nn.Linear(2, 2))
