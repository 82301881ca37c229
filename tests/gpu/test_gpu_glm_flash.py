"""On a GPU: GLM-5.3-Flash at true widths, fla's kernels against the plain ones in bfloat16."""

from collections.abc import Callable

import pytest
import torch
import torchtitan.tools.utils
from torch import nn

from components.models.glm_flash.block import GlmFlashBlock
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.hyper_connections import MixAffine
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.short_conv import ShortConv
from components.models.glm_flash.trimmed import trim
from components.titan.moe import force_balance
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from tests.swaps import swap_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

LENGTHS = (1, 700, 3, 64, 1216, 65, 2047)
FULL_PRECISION = (KdaCore, MixAffine, ShortConv)


def settings() -> GlmFlashModel:
    overrides = ["model.vocab_size=4096", "model.n_experts=16"]
    recipe = load_recipe(RECIPES / "glm_flash_4layer_8k_1xh200.yaml", overrides).recipe
    assert isinstance(recipe.model, GlmFlashModel)
    return recipe.model


def with_fla(config: GlmFlashBlock.Config) -> GlmFlashBlock.Config:
    from components.models.glm_flash.fla_kernels import fla_kda, fla_short_conv

    swap_parts(config, KdaCore.Config, fla_kda)
    swap_parts(config, ShortConv.Config, fla_short_conv)
    return config


def block_config(index: int) -> GlmFlashBlock.Config:
    config = settings().build_spec().model.layers[index]
    trim(config)
    if config.moe is not None:
        # Chosen experts would differ where rounding does; forced ones compare the arithmetic.
        force_balance(config.moe.router, True)
    return config


def randomise(module: nn.Module) -> None:
    """Values at which every term matters; initial ones leave several neutral."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=draw, device="cuda", dtype=p.dtype)
        if p.dim() >= 2:
            p.data.copy_(noise * (0.5 if "conv" in name else p.shape[-1] ** -0.5))
        elif "norm" in name and name.endswith("weight") or name.endswith("scale"):
            p.data.copy_(1 + 0.2 * noise)
        else:
            p.data.copy_(0.5 * noise)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    for child in module.modules():
        if not isinstance(child, FULL_PRECISION):
            for parameter in child.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


Result = dict[str, torch.Tensor]


def run(
    build: Callable[[], GlmFlashBlock.Config],
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    inputs: torch.Tensor,
    pull: torch.Tensor,
) -> Result:
    """Output, gradient of the streams and of every parameter, for one block."""
    with torch.device("cuda"):
        block = build().build()
        block.init_states()
    block.load_state_dict(weights, strict=False)
    cast(block, dtype)
    documents = Documents.from_lengths(LENGTHS, "cuda")
    streams = inputs.detach().to(dtype, copy=True).requires_grad_()
    out = block(streams, documents)
    out.backward(pull.to(dtype))
    gradients = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "streams": streams.grad, **gradients}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.mark.parametrize("index", [0, 1], ids=["kda+dense", "kda+moe"])
def test_a_block_with_fla_is_as_close_to_float32_as_the_plain_one(index: int) -> None:
    config = settings()
    with torch.device("cuda"):
        block = block_config(index).build()
        block.init_states()
    randomise(block)
    cast(block, torch.bfloat16)
    weights = {n: p.detach() for n, p in block.named_parameters()}
    draw = torch.Generator(device="cuda").manual_seed(1)
    shape = (1, sum(LENGTHS), config.hc_mult, config.dim)
    inputs, pull = (torch.randn(shape, generator=draw, device="cuda").bfloat16() for _ in "xy")
    exact = run(lambda: block_config(index), weights, torch.float32, inputs, pull)
    plain = run(lambda: block_config(index), weights, torch.bfloat16, inputs, pull)
    fla = run(lambda: with_fla(block_config(index)), weights, torch.bfloat16, inputs, pull)
    assert exact.keys() == plain.keys() == fla.keys()
    errors = {n: (error(plain[n], exact[n]), error(fla[n], exact[n])) for n in exact}
    for name, (ours, theirs) in errors.items():
        print(f"{index} {name:40} plain {ours:.2e}  fla {theirs:.2e}")
    # The error of a few numbers is a matter of luck, in both.
    factor = {n: 1.5 if exact[n].numel() >= 32 else 3.0 for n in exact}
    bad = {n: e for n, e in errors.items() if not e[1] <= factor[n] * e[0] + 3e-3}
    assert not bad
    assert max(max(pair) for pair in errors.values()) < 5e-2


def test_outputs_do_not_depend_on_later_tokens_in_bfloat16() -> None:
    model = settings().build_spec().model
    trim(model)
    model.layers = [with_fla(layer) for layer in model.layers]
    with torch.device("cuda"):
        decoder = model.build()
        decoder.init_states()
    randomise(decoder)
    cast(decoder, torch.bfloat16)
    draw = torch.Generator(device="cuda").manual_seed(2)
    tokens = torch.randint(4096, (1, 3000), generator=draw, device="cuda")
    with torch.no_grad():
        whole = decoder(tokens)
        for cut in (1, 15, 16, 17, 64, 100, 1027, 2900):
            changed = tokens.clone()
            changed[:, cut:] = (changed[:, cut:] + 7) % 4096
            other = decoder(changed)
            assert torch.equal(other[:, :cut], whole[:, :cut]), cut
            assert not torch.equal(other[:, cut], whole[:, cut])
