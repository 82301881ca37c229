"""A site of the streams in kernels: gradients, operators, and its place in a model.

On a CPU the operators run their definition; the kernels themselves run in Triton's interpreter.
"""

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

from components.models.glm_flash.fused_connections import (
    FusedHyperConnection,
    triton_hyper_connections,
)
from components.models.glm_flash.hyper_connections import HyperConnection
from components.models.glm_flash.trimmed import trim
from components.titan.trainer import RecipeTrainer
from kernels.backends.ops import HYPER_CONNECTIONS
from kernels.hyper_connections import fused, naive, op
from kernels.hyper_connections.merge import merge_reference
from kernels.hyper_connections.naive import Constants
from tests.swaps import swap_parts
from tests.training import losses, small_overrides, train, write_corpus
from tests.unit.kernel_support import draw, first_form
from tests.unit.models_support import tiny_glm

ROOT = Path(__file__).parents[2]
CONSTANTS = Constants(norm_eps=1e-5, eps=1e-6, iterations=3)
T, N, D = 3, 2, 4
M = N * (N + 2)


def leaves(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Streams, weight, terms, a mixer's output."""
    shapes = (1, T, N, D), (M, N * D), (2, M), (1, T, D)
    return [draw(*s, seed=i).to(dtype).requires_grad_() for i, s in enumerate(shapes)]


def site(
    streams: torch.Tensor, fn: torch.Tensor, terms: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x, held, post, mix = fused.map_and_read(streams, fn, terms, CONSTANTS)
    return x, fused.merge(held, out, post, mix)


def defined(
    streams: torch.Tensor, fn: torch.Tensor, terms: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    made = naive.map_and_read(streams[0], fn, terms, CONSTANTS)
    return made.x[None], merge_reference(streams, out, made.post[None], made.mix[None])


def test_a_site_is_as_defined_and_has_the_gradients_of_its_values() -> None:
    for found, wanted in zip(site(*leaves()), defined(*leaves()), strict=True):
        torch.testing.assert_close(found, wanted)
    assert torch.autograd.gradcheck(site, leaves())


@pytest.mark.parametrize("used", range(4))
def test_results_that_nobody_uses_have_no_part_in_gradients(used: int) -> None:
    given = leaves()[:3]
    result = fused.map_and_read(*given, CONSTANTS)[used]
    found = torch.autograd.grad(result.square().sum(), given, materialize_grads=True)
    made = naive.map_and_read(given[0][0], *given[1:], CONSTANTS)
    wanted = (made.x, given[0], made.post, made.mix)[used]
    pairs = zip(
        found,
        torch.autograd.grad(
            wanted.square().sum(), given, materialize_grads=True, allow_unused=True
        ),
        strict=True,
    )
    for gradient, expected in pairs:
        torch.testing.assert_close(gradient, expected)


def test_a_frozen_weight_gets_no_gradient_and_changes_no_other() -> None:
    free, frozen = leaves(), leaves()
    frozen[1].requires_grad_(False)
    for given in (free, frozen):
        sum(out.square().sum() for out in site(*given)).backward()
    assert frozen[1].grad is None
    for index in (0, 2, 3):
        assert torch.equal(frozen[index].grad, free[index].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operators_say_truly_what_they_return(dtype: torch.dtype) -> None:
    """Shapes and dtypes without values; nothing returned shares memory with what was given."""
    streams, fn, terms, out = (t.detach() for t in leaves(dtype))
    terms, wide = terms.float(), torch.float32
    made = op.map_and_read(streams[0], fn, terms, CONSTANTS)
    grads = [torch.randn_like(t) for t in made[:3]]
    calls: dict[Any, tuple[Any, ...]] = {
        op._map_and_read: (streams[0], fn, terms, *CONSTANTS),
        op.merge: (streams[0], out[0], made.post, made.mix),
        op.merge_backward: (streams[0], streams[0], out[0], made.post, made.mix),
    }
    for held, weight in ((streams[0], True), (None, True)):
        args = *grads, held, streams[0], fn, terms, made.z, made.norm, *CONSTANTS, weight
        calls[op._map_and_read_backward] = args
        for operator, given in calls.items():
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(operator, given, test_utils=checks)
    assert made.z.dtype == made.mix.dtype == wide and made.x.dtype == dtype


def test_no_tokens_are_no_special_case() -> None:
    given = [t.detach()[:, :0].requires_grad_() if t.dim() > 2 else t for t in leaves()]
    x, merged = site(*given)
    (x.sum() + merged.sum()).backward()
    assert merged.shape == (1, 0, N, D) and not given[1].grad.any()  # type: ignore[union-attr]


# In the model.


def build(*sites: str, kernels: bool) -> nn.Module:
    config = tiny_glm().build_spec().model
    if sites:
        trim(config, *sites)
    if kernels:
        swap_parts(config, HyperConnection.Config, triton_hyper_connections)
    model = config.build()
    torch.manual_seed(3)
    model.init_states()
    return model


def run(model: nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 320, (2, 150), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    logits.backward(torch.ones_like(logits) / logits.numel())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


@pytest.mark.parametrize("sites", [(), ("hyper_connections",)], ids=["plain", "trimmed"])
def test_kernels_change_a_model_by_rounding_whatever_is_trimmed(sites: tuple[str, ...]) -> None:
    plain, model = run(build(kernels=False)), build(*sites, kernels=True)
    assert sum(isinstance(m, FusedHyperConnection) for m in model.modules()) == 8
    found = run(model)
    assert list(found) == list(plain)
    for name, wanted in plain.items():
        assert (found[name] - wanted).norm() <= 1e-4 * wanted.norm() + 1e-9, name


RECOMPUTED = [
    "components.layer_recompute.enabled=true",
    "components.layer_recompute.every=2",
    "components.layer_recompute.keep_sublayers=true",
    "components.precision_trimming.enabled=true",
    "debug.leak_guard=true",
]


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.slow
def test_a_run_in_kernels_that_replays_merges_learns_what_the_plain_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    small = [o for o in small_overrides(corpus) if not o.startswith(("model=", "training.steps"))]
    small = ["model=glm_flash_tiny", "training.steps=2", *small]
    train(tmp_path / "plain", small)
    able = replace(HYPER_CONNECTIONS.backends["triton"], why_not=lambda device, shape: None)
    monkeypatch.setitem(HYPER_CONNECTIONS.backends, "triton", able)

    def look(trainer: RecipeTrainer) -> int:
        trainer.train()
        modules = trainer.model_parts[0].modules()
        return sum(isinstance(module, FusedHyperConnection) for module in modules)

    overrides = [*small, "model.hyper_connections_kernel=auto", *RECOMPUTED]
    assert train(tmp_path / "fused", overrides, use=look) == 8
    assert losses(tmp_path / "fused") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


# The kernels.

HC = "kernels.hyper_connections."
BFLOAT16 = ("x", "fn", "dx", "dheld", "dstreams", "streams", "out", "merged", "grad", "dout")
CONSTEXPRS = {
    "N": 4, "M": 24, "PADDED": 32, "ROWS": 64, "COLS": 64, "BLOCK": 2048, "LANES": 128,
    "VECTOR": 8, "STAGES": 2, "TURNS": 5, "HELD": True, "WEIGHT": True, "NARROW": True,
}  # fmt: skip
KERNELS = {
    "triton_project._project_kernel": {},
    "triton_project._gradients_kernel": {},
    "triton_maps._maps_kernel": {"ROWS": 32},
    "triton_maps._maps_back_kernel": {"ROWS": 32},
    "triton_streams._read_kernel": {},
    "triton_streams._read_back_kernel": {},
    "triton_streams._merge_kernel": {},
    "triton_streams._merge_back_kernel": {},
}


def source_of(name: str) -> Any:
    """A kernel with the types that it has in a training in bfloat16, for Triton's compiler."""
    from triton.compiler import ASTSource

    module, kernel = name.split(".")
    fn = getattr(importlib.import_module(HC + module), kernel)
    known = CONSTEXPRS | KERNELS[name]
    numbers = {"eps": "fp32", "iterations": "i32", "tokens": "i32", "dim": "i32", "width": "i32",
               "split": "i32"}  # fmt: skip
    numbers |= dict.fromkeys(BFLOAT16, "*bf16")
    kinds = {n: "constexpr" if n in known else numbers.get(n, "*fp32") for n in fn.arg_names}
    constants = {(i,): known[n] for i, n in enumerate(fn.arg_names) if n in known}
    whole = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(fn.arg_names)
        if kinds[n].startswith("*") or n in ("dim", "width")
    }
    return ASTSource(fn, kinds, constants, whole)


@pytest.mark.parametrize("name", KERNELS)
def test_products_with_numbers_of_tokens_are_64_bit(name: str) -> None:
    """Addresses of rows: a batch of 128K tokens has 2^31 numbers in its streams."""
    text = first_form(source_of(name))
    products = re.findall(r"= arith\.muli %(?:row|rows|t)[_\d]*, .*?(?:x|: )(i\d+)[>,\s]", text)
    assert set(products) == {"i64"}, products


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_without_a_gpu(name: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    made = triton.compile(
        source_of(name), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    text = made.asm["ptx"]
    assert "ld.global.v4" in text or "cp.async.cg" in text  # 16 bytes at a time
    assert ("wgmma" in text) == name.startswith("triton_project")
    assert made.metadata.shared <= 232_448


def test_kernels_do_as_defined_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.hyper_connections_interpreted"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("as defined\n"), done.stdout + done.stderr
