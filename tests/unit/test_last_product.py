"""Gradients of weighed experts without their outputs, against plain autograd."""

import pytest
import torch

from components.expert_dispatch.last_product import ExpertRuns, ParameterSum, expert_gradients
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


@pytest.mark.parametrize(("keep", "single"), [(False, True), (True, False)])
@pytest.mark.parametrize("family", DTYPES)
@pytest.mark.parametrize("frozen", ["", "w1_EFD", LAST, "x", "x w1_EFD w2_EDF w3_EFD"])
def test_every_gradient_is_that_of_the_weighed_outputs(
    family: str, frozen: str, keep: bool, single: bool
) -> None:
    experts = build(config_of(family), DTYPES[family]).inner_experts
    rows, pull, weights = inputs(DTYPES[family])
    x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, COUNTS)
    (out.float() * w[:, None] if family == "moe" else out * w[:, None].double()).to(
        out.dtype
    ).backward(pull)
    named = dict(experts.named_parameters())
    sums = {
        name: ParameterSum(named[name], single=single) for name in named.keys() - frozen.split()
    }
    with torch.no_grad():
        runs = ExpertRuns(
            parts=parts_of(experts),
            weights=named,
            ends=COUNTS.cumsum(0).int(),
            sizes=COUNTS.tolist(),
        )
        products = runs.gate_and_up(rows)
        assert torch.equal(runs.outputs(*products), out)
        of_rows, of_weights = expert_gradients(
            runs,
            rows.clone,
            pull.clone,
            weights,
            sums,
            kept=products if keep else None,
            of_rows="x" not in frozen,
        )
    wide = torch.float64 if family == "glm" else torch.float32
    assert all(found.whole().dtype == wide for found in sums.values())
    pairs = [(found.total().to(DTYPES[family]), named[name].grad) for name, found in sums.items()]
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


@pytest.mark.parametrize("rounded", [False, True])
def test_gradients_of_several_chunks_are_added_up(rounded: bool) -> None:
    like, draw = torch.empty(2, 3, 4, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    found, expected = ParameterSum(like, single=False, rounded=rounded), torch.zeros(2, 3, 4)
    parts = parts_of(build(config_of("moe")).inner_experts)
    assert torch.equal(found.total(), torch.zeros_like(like))
    for sizes in ([2, 0], [0, 5], [0, 0], [3, 1]):
        ends = torch.tensor(sizes).cumsum(0).int()
        runs = ExpertRuns(parts=parts, weights={}, ends=ends, sizes=sizes)
        pull, rows = (torch.randn(sum(sizes), n, generator=draw).bfloat16() for n in (3, 4))
        found.add(pull, rows, runs)
        for expert, (a, b) in enumerate(zip(pull.split(sizes), rows.split(sizes), strict=True)):
            expected[expert] += a.float().t() @ b.float()
    assert found.total().dtype == (torch.bfloat16 if rounded else torch.float32)
    limit = 1e-2 if rounded else 1e-6
    torch.testing.assert_close(found.whole(), expected, rtol=limit, atol=limit)
