"""torchtitan's container over streamed optimizers, on modules without a trainer."""

from collections.abc import Iterator

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer

from components.offload.accountant import host_accountant
from components.titan.optimizer import AdamWSettings
from components.titan.streamed_optimizer import NonFiniteGradient, StreamedOptimizers
from components.titan.working_weights import use_compute_dtypes
from tests.unit.streamed_parts import OWNER, backward, parts, streamed


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    held = OWNER in host_accountant().holdings
    host_accountant().release(OWNER)
    assert not held


@pytest.mark.parametrize("split", [0, 1, 0.5])
def test_parts_share_the_memory_and_learn_what_torch_learns(split: float) -> None:
    ours, theirs = parts(), parts()
    container = streamed(ours, split=split)
    stock = AdamWSettings(lr=0.1).container().build(model_parts=theirs)
    assert len(container) == 2
    for seed in range(5):
        for model_parts, optimizers in ((ours, container), (theirs, stock)):
            optimizers.zero_grad()
            backward(model_parts, seed)
            optimizers.step()
    for mine, other in zip(ours, theirs, strict=True):
        for (name, weight), expected in zip(
            mine.named_parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(weight, expected), name
    saved, expected = container.state_dict(), stock.state_dict()
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(saved[name], value) if torch.is_tensor(value) else saved[name] == value
        assert same, name
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for each in container
        for parameter, master in each.masters.items()
        for tensor in (
            master,
            each.state[parameter]["exp_avg"],
            each.state[parameter]["exp_avg_sq"],
        )
    )
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] - spans[0][0] <= container.pinned
    container.close()


def test_saving_makes_no_step_and_no_gradient() -> None:
    model_parts = parts()
    container = streamed(model_parts)
    state = container.state_dict()
    steps = [value for name, value in state.items() if name.endswith(".step")]
    assert steps and all(step == 0 for step in steps)
    assert all(p.grad is None for part in model_parts for p in part.parameters())
    container.close()


def test_loading_keeps_the_memory_and_the_kernel() -> None:
    model_parts = parts()
    stock = AdamWSettings(lr=0.1, implementation="foreach").container()
    other = stock.build(model_parts=parts())
    backward(other.model_parts, 0)
    other.step()
    container = streamed(model_parts)
    before = {n: v.data_ptr() for n, v in container.state_dict().items() if torch.is_tensor(v)}
    container.load_state_dict({**other.state_dict(), "something else": 1})
    loaded = container.state_dict()
    assert {n: v.data_ptr() for n, v in loaded.items() if torch.is_tensor(v)} == before
    for name, value in other.state_dict().items():
        if torch.is_tensor(value):
            assert torch.equal(loaded[name], value), name
    assert loaded["param_groups.a.weight.fused"] and not loaded["param_groups.a.weight.foreach"]
    container.close()


def test_hooks_run_once_around_a_step() -> None:
    # The class must not be hooked a second time because its base class was used before.
    OptimizersContainer.Config(param_groups=AdamWSettings().container().param_groups).build(
        model_parts=parts()
    ).step()
    model_parts = parts()
    container = streamed(model_parts)
    seen: list[str] = []
    container.register_step_pre_hook(lambda *_: seen.append("before"))
    container.register_step_post_hook(lambda *_: seen.append("after"))
    backward(model_parts, 0)
    container.step()
    assert seen == ["before", "after"]
    container.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_gradient_is_named_before_any_hook_runs(value: float) -> None:
    model_parts = parts()
    container = streamed(model_parts)
    container.register_step_pre_hook(lambda *_: pytest.fail("there is no step"))
    backward(model_parts, 0)
    model_parts[1].c.weight.grad[1, 2] = value
    with pytest.raises(NonFiniteGradient, match=r"1 of 6 weights \(c\.weight\) hold"):
        container.step()
    container.close()


def test_a_large_gradient_is_none_that_is_broken() -> None:
    model_parts = parts()
    container = streamed(model_parts)
    backward(model_parts, 0)
    model_parts[1].c.weight.grad.fill_(3e38)
    container.step()
    assert container.skipped == 0
    container.close()


def test_other_optimizers_are_refused() -> None:
    groups = AdamWSettings().container().param_groups
    groups[0].optimizer_name = "Adam"
    with pytest.raises(NotImplementedError, match="'Adam' cannot be streamed; legal: AdamW"):
        StreamedOptimizers.Config(
            param_groups=groups, bucket_parameters=64, slots=1, split=0, cpu_threads=1,
            host_budget=None, nonfinite="raise", owner=OWNER,
        ).build(model_parts=parts())  # fmt: skip


def test_modules_outside_of_fsdp_may_name_their_dtype() -> None:
    """Its weight is rounded in place, its gradients are not; the others stay what they are."""
    (model, _) = parts()
    model.b.working_dtype = torch.bfloat16
    model.b.weight.note = "stays"
    weights = list(model.parameters())
    expected = model.b.weight.detach().to(torch.bfloat16)
    assert use_compute_dtypes(model) == 1
    assert [id(p) for p in model.parameters()] == [id(p) for p in weights]
    assert [p.dtype for p in weights] == [torch.float32] * 2 + [torch.bfloat16]
    assert torch.equal(model.b.weight, expected) and model.b.weight.note == "stays"
    model.b.weight.grad = torch.ones(5, 7)
    assert use_compute_dtypes(model) == 0


def test_masters_are_the_weights_before_rounding() -> None:
    model_parts = parts()
    model_parts[0].b.working_dtype = torch.bfloat16
    exact = model_parts[0].b.weight.detach().clone()
    container = streamed(model_parts)
    weight = model_parts[0].b.weight
    assert torch.equal(container.masters[weight], exact)
    container.masters[weight].fill_(1.001)
    container.refresh_weights()
    assert weight.eq(torch.tensor(1.001).to(torch.bfloat16)).all()
    container.close()
