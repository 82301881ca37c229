"""Small models with and without recomputed layers, and what one step of them leaves behind."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from components.models.library import TitanModel
from components.models.settings import ModelSettings
from components.recompute.layer import RecomputedLayer
from components.recompute.policy import LayerRecomputePolicy
from components.recompute.tape import choice, sublayer
from components.titan.attention import sdpa
from components.titan.router import keep_choices
from tests.swaps import swap_parts
from tests.unit.models_support import tiny_glm, tiny_moe

LENGTHS = (21, 40, 11)
TOKENS = sum(LENGTHS)

# Four layers at least, so that every=3 leaves a last segment of another size.
MODELS: dict[str, Callable[[], ModelSettings]] = {
    "glm": lambda: tiny_glm(index_topk=16),
    "moe": lambda: tiny_moe(n_layers=4, n_shared_experts=1),
    "deepseek_v3": lambda: TitanModel(family="deepseek_v3", flavor="debugmodel"),
    "gpt_oss": lambda: TitanModel(family="gpt_oss", flavor="debugmodel"),
    "llama3": lambda: TitanModel(family="llama3", flavor="debugmodel"),
}
DEPTH = 4
"""Layers of each."""


def build(name: str, change: Callable[[Any], None] | None = None, **settings: Any) -> nn.Module:
    """An initialised model on the CPU.

    Args:
        change: edits the decoder's config.
        settings: of the recomputation; there is none without any.
    """
    decoder = MODELS[name]().build_spec().model
    # torchtitan's debug models have more; a test need not pay for them.
    decoder.layers = decoder.layers[:DEPTH]
    swap_parts(decoder, FlexAttention.Config, sdpa)
    for _, config, parent, attribute in list(decoder.traverse(TokenChoiceTopKRouter.Config)):
        if type(config) is TokenChoiceTopKRouter.Config:
            setattr(parent, attribute, keep_choices(config))
    if change is not None:
        change(decoder)
    model = decoder.build()
    torch.manual_seed(1)
    model.init_states()
    if name == "gpt_oss":
        # torchtitan's experts of this family return bfloat16 whatever they are given.
        model.to(torch.bfloat16)
    if name == "glm":
        model.freeze()
    if settings:
        recompute(model, **settings)
    return model


def recompute(model: nn.Module, **settings: Any) -> None:
    """Wrap the layers of a model."""
    LayerRecomputePolicy.Config(**settings).build(dump_folder="").apply(model)


def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
    """Cross entropy of one micro-batch: two rows, in each the same packed documents."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 256, (2, TOKENS + 1), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1).contiguous()
    device = next(model.parameters()).device
    tokens, positions = tokens.to(device), positions.to(device)
    masks = model.get_attention_masks(positions)
    logits = model(tokens[:, :-1], positions=positions, attention_masks=masks)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def step(model: nn.Module, seeds: Iterable[int] = (0,)) -> dict[str, torch.Tensor]:
    """Losses, accumulated gradients and expert counts of one step, by name."""
    model.zero_grad()
    left: dict[str, torch.Tensor] = {}
    for seed in seeds:
        torch.manual_seed(100 + seed)
        loss = loss_of(model, seed)
        loss.backward()
        left[f"loss {seed}"] = loss.detach()
        left[f"random {seed}"] = torch.rand(1)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            left[name] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        if "tokens_per_expert" in name:
            left[name] = buffer.clone()
            buffer.zero_()
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in left.items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every value equal to the bit."""
    assert actual.keys() == expected.keys()
    assert [n for n, value in expected.items() if not torch.equal(actual[n], value)] == []


def layers(model: Any) -> list[RecomputedLayer]:
    """The wrapped layers, in order."""
    return list(model.layers.values())


class NoisyLayer(nn.Module):
    """Draws random numbers within a choice, within a part, and after both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.detach()
        picked = choice(lambda: (scores + torch.randn_like(scores)).argmax(-1))
        part = sublayer(lambda: F.dropout(self.linear(x), 0.5) * torch.rand(1, device=x.device))
        return F.dropout(x + part * picked.unsqueeze(-1), 0.2)


class NoisyModel(nn.Module):
    """Five of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(place): NoisyLayer() for place in range(5)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def noisy_step(device: str = "cpu", **settings: Any) -> dict[str, torch.Tensor]:
    """Losses, gradients and the number drawn after each of two passes, by name."""
    model = NoisyModel().to(device)
    if settings:
        recompute(model, **settings)
    left = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss = model(torch.randn(6, 8, device=device)).square().sum()
        loss.backward()
        left |= {f"loss {seed}": loss.detach(), f"next {seed}": torch.rand(1, device=device)}
    gradients = (parameter.grad for parameter in model.parameters())
    return left | {str(place): grad for place, grad in enumerate(gradients) if grad is not None}
