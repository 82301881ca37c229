"""fla's norms are launched in one form, and still found by what fills their autotuners."""

import sys
from types import ModuleType
from typing import Any

import pytest

from kernels.kda import one_form
from kernels.tuned import __main__ as tune
from kernels.tuned import fla


class Kernel:
    """Of fla's kind: tuned, launched by grid and keywords."""

    cache: dict[Any, Any]
    configs = (1, 2)

    def __init__(self, *arguments: str) -> None:
        self.arg_names, self.launched, self.cache = list(arguments), [], {}
        self.base_fn = ModuleType(one_form.MODULE)
        self.base_fn.__module__ = one_form.MODULE

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.launched.append((grid, arguments))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(one_form.MODULE)
    forward, backward = one_form.KERNELS
    vars(made).update({forward: Kernel("x", "T", "NB"), backward: Kernel("x", "T")})
    for name in one_form.MODULE.split(".")[:-1]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, one_form.MODULE, made)
    return made


def test_every_number_of_blocks_is_the_same_to_the_kernel(module: ModuleType) -> None:
    kernel = module.l2norm_fwd_kernel
    for _ in range(2):
        one_form.use_one_form()
    for tokens in (5, 70_000, 10**6):
        grid = (tokens // 8,)
        module.l2norm_fwd_kernel[grid](x="x", T=tokens, NB=-(-tokens // 65_536))
    assert kernel.launched == [
        ((n // 8,), {"x": "x", "T": n, "NB": one_form.BLOCKS}) for n in (5, 70_000, 10**6)
    ]


def test_a_version_without_such_a_number_is_left_alone(module: ModuleType) -> None:
    kernel = module.l2norm_bwd_kernel
    one_form.use_one_form()
    assert module.l2norm_bwd_kernel is kernel


def test_its_autotuner_is_found_behind_it(module: ModuleType) -> None:
    kernel = module.l2norm_fwd_kernel
    one_form.use_one_form()
    assert fla.autotuner(one_form.MODULE, "l2norm_fwd_kernel") is kernel
    found = {name: tuner for where, name, tuner in tune.tunable() if where == one_form.MODULE}
    assert found["l2norm_fwd_kernel"] is kernel


@pytest.mark.slow
def test_the_locked_version_has_such_kernels() -> None:
    """Or there is nothing to stand in for any more."""
    one_form.use_one_form()
    held = sys.modules[one_form.MODULE]
    assert all(isinstance(getattr(held, name), one_form.OneForm) for name in one_form.KERNELS)
