"""What a layer keeps and needs whose sparse attention, or streams, run in kernels, or dense."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn

from components.models.glm_flash import sparse_kernels
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.mla import SparseMlaCore
from components.models.glm_flash.trimmed import SITES
from kernels import row_blocks
from kernels.backends.ops import HYPER_CONNECTIONS
from kernels.dsa import absorbed, dense
from kernels.hyper_connections import fused
from tests.unit.absorbed_support import Gathering, offer
from tests.unit.models_support import tiny_glm
from tests.unit.test_saved_bytes import (
    DSA_MOE,
    KDA_DENSE,
    NARROW,
    build,
    measured,
    peak_of,
    small_budgets,
    small_recipe,
)

KERNELS = {
    "tilelang": sparse_kernels.tilelang_sparse_mla,
    "dense": sparse_kernels.dense_sparse_mla,
}
TOKENS, PIECE = 1024, 256


@pytest.fixture
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings whose layers are built with the kernel of the test's parameter."""
    small_budgets(monkeypatch)
    offer(monkeypatch, Gathering(), "tilelang")
    settings = tiny_glm(sparse_mla_kernel=request.param, sparse_mla_chunk=2**20)
    spec = settings.build_spec()

    def build_spec(self: Any) -> Any:
        for _, core, parent, attribute in list(spec.model.traverse(SparseMlaCore.Config)):
            if type(core) is SparseMlaCore.Config:
                setattr(parent, attribute, KERNELS[request.param](core))
        return spec

    monkeypatch.setattr(type(settings), "build_spec", build_spec)
    return settings


def dsa_layer(model: Any, piece: int) -> nn.Module:
    return list(build(model, torch.bfloat16, tuple(SITES), piece).layers.values())[DSA_MOE]


@pytest.mark.parametrize("piece", [0, PIECE])
@pytest.mark.parametrize("model", KERNELS, indirect=True)
def test_a_layer_keeps_and_needs_what_the_arithmetic_says(model: Any, piece: int) -> None:
    layer = dsa_layer(model, piece)
    assert type(layer.attention.core) is not SparseMlaCore
    recipe = small_recipe(model, TOKENS, tuple(SITES), piece)
    streams = torch.randn(1, TOKENS, 4, 128).bfloat16().requires_grad_()
    documents = Documents.from_lengths((TOKENS,))
    kept = measured(layer, streams, documents)
    assert sum(kept.values()) == model.layer_saved_bytes(recipe, "cpu")[DSA_MOE]
    # A kernel's own memory is not seen here; tests/unit/test_kernel_shape_budget.py bounds it.
    found = peak_of(layer, streams, documents)
    bound = model.layer_working_set_bytes(recipe, "cpu")[DSA_MOE]
    assert found <= bound <= 2.5 * found


def test_a_piece_needs_room_for_what_its_kernel_made() -> None:
    heads, rank, chunk = 64, 128, 2**30

    def needed(kernel: str) -> int:
        settings = tiny_glm(
            n_heads=heads, kv_lora_rank=rank, sparse_mla_kernel=kernel, sparse_mla_chunk=chunk
        )
        recipe = small_recipe(settings, TOKENS, tuple(SITES), PIECE)
        sizes = settings.layer_working_set_bytes(recipe, "cpu")
        assert sizes is not None
        return sizes[DSA_MOE]

    made = PIECE * heads * (rank * 2 + 4)
    latents = TOKENS * rank * (2 + 4)
    assert needed("tilelang") - needed("torch") == (
        made + chunk + latents - 2 * absorbed.CHUNK_BYTES
    )


def test_dense_attention_needs_room_for_heads_that_are_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = tiny_glm(n_heads=64, sparse_mla_kernel="dense", sparse_mla_chunk=2**30)
    recipe = small_recipe(settings, TOKENS, tuple(SITES), 0)
    row = TOKENS * (settings.qk_head_dim + settings.v_head_dim)

    def needed() -> int:
        sizes = settings.layer_working_set_bytes(recipe, "cpu")
        assert sizes is not None
        return sizes[DSA_MOE]

    whole = needed()
    monkeypatch.setattr(dense, "MOST_ELEMENTS", 20 * row)
    # Four groups of 16: keys and values and their gradients, those in float32 as well.
    assert whole - needed() == (64 - 16) * row * (2 + 2 + 4)


def test_streams_that_kernels_merge_again_whole_have_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where streams decide, and blocks of the trimmed parts are too small to hide them."""
    small_budgets(monkeypatch)
    monkeypatch.setattr(row_blocks, "ELEMENTS", 2**10)
    monkeypatch.setattr(fused, "AGAIN", 2**20)
    able = replace(HYPER_CONNECTIONS.backends["triton"], why_not=lambda device, shape: None)
    monkeypatch.setitem(HYPER_CONNECTIONS.backends, "triton", able)
    settings = tiny_glm(**NARROW, hyper_connections_kernel="triton")
    sites, tokens = tuple(SITES), 256
    streams = torch.randn(1, tokens, 4, settings.dim).bfloat16().requires_grad_()
    recipe = small_recipe(settings, tokens, sites, 64, 64, True)
    model: Any = build(settings, torch.bfloat16, sites, 64, 64, True, True)
    layer = list(model.layers.values())[KDA_DENSE]
    found = peak_of(layer, streams, Documents.from_lengths((tokens,)))
    bound = settings.layer_working_set_bytes(recipe, "cpu")[KDA_DENSE]
    assert found <= bound <= 1.25 * found
