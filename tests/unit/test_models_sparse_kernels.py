"""Which kernels GLM-5.3-Flash's sparse attention takes, and that they fit into its layers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from components.models.glm_flash.mla import SparseMLA
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.sparse_kernels import (
    KernelPoolSelector,
    KernelSparseMlaCore,
    dense_sparse_mla,
    tilelang_sparse_mla,
    triton_indexer,
)
from components.titan.trainer import RecipeTrainer
from kernels.backends.ops import HYPER_CONNECTIONS, INDEXER, SPARSE_MLA
from kernels.dsa import sparse_mla
from tests.training import losses, small_overrides, train, write_corpus
from tests.unit.absorbed_support import Gathering, Sorting, offer
from tests.unit.chunked_support import build, config_of, draw, gradients, runner
from tests.unit.models_support import tiny_glm

PLAIN: dict[str, Any] = {
    "kda_kernel": "reference", "sparse_mla_kernel": "torch", "indexer_kernel": "torch",
    "hyper_connections_kernel": "torch",
}  # fmt: skip


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every kernel runs."""
    for made in (SPARSE_MLA, INDEXER, HYPER_CONNECTIONS):
        for name, backend in list(made.backends.items()):
            runs = replace(backend, why_not=lambda device, shape: None)
            monkeypatch.setitem(made.backends, name, runs)


def test_auto_takes_the_kernels_where_they_run(able: None) -> None:
    choice = tiny_glm(kda_kernel="reference", hyper_connections_kernel="auto").choose_kernels(
        "cuda"
    )
    names = [factory.__name__ for factory in choice.overrides]
    assert names == ["tilelang_sparse_mla", "triton_indexer", "triton_hyper_connections"]
    assert choice.notes[1:] == (
        "sparse_mla kernel: tilelang (auto on cuda)", "indexer kernel: triton (auto on cuda)",
        "hyper_connections kernel: triton (auto on cuda)",
    )  # fmt: skip


def test_the_dense_baseline_has_to_be_asked_for() -> None:
    model = tiny_glm(**{**PLAIN, "sparse_mla_kernel": "dense"})
    for device in ("cpu", "cuda"):
        choice = model.choose_kernels(device)
        assert [factory.__name__ for factory in choice.overrides] == ["dense_sparse_mla"]


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("sparse_mla_kernel", "tilelang"),
        ("indexer_kernel", "triton"),
        ("hyper_connections_kernel", "triton"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(key: str, wanted: str) -> None:
    with pytest.raises(ValueError) as caught:
        tiny_glm(**{**PLAIN, key: wanted}).choose_kernels("cpu")
    assert str(caught.value) == (
        f"model.{key}: {wanted!r} cannot run here: its kernels run on CUDA only, and this run is "
        "on the cpu; legal here: 'torch' (the reference path) or 'auto'"
    )


def test_the_machine_is_asked_about_the_models_widths_and_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[Any] = []
    for made, name in (
        (SPARSE_MLA, "tilelang"), (INDEXER, "triton"), (HYPER_CONNECTIONS, "triton")
    ):  # fmt: skip
        asked = replace(made.backends[name], why_not=lambda device, shape: shapes.append(shape))
        monkeypatch.setitem(made.backends, name, asked)
    model = GlmFlashModel(kda_kernel="reference", hyper_connections_kernel="auto")
    model.choose_kernels("cuda", 4)
    assert shapes == [
        {"model.n_heads": 64, "model.kv_lora_rank": 512, "model.index_kpool": 4,
         "model.index_topk": 2048, "training.mixed_precision_param": 4},
        {"model.index_n_heads": 32, "model.index_head_dim": 128, "model.index_kpool": 4,
         "model.index_topk": 2048, "training.mixed_precision_param": 4},
        {"model.hc_mult": 4, "training.mixed_precision_param": 4},
    ]  # fmt: skip


def test_a_model_without_sparse_attention_chooses_no_kernels_for_it() -> None:
    model = tiny_glm(**{**PLAIN, "layer_types": ["kda"] * 4})
    assert model.choose_kernels("cpu").notes == (
        "KDA kernel: reference", "hyper_connections kernel: torch",
    )  # fmt: skip


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Gathering, Sorting]:
    """Stand-ins under the kernels' names, that run on a CPU."""
    made = Gathering(), Sorting()
    offer(monkeypatch, made[0], "tilelang")
    offer(monkeypatch, made[1], "triton", INDEXER)
    return made


def part(kernel: str, chunk_tokens: int | None) -> torch.nn.Module:
    config: SparseMLA.Config = config_of("dsa", chunk_tokens)
    if kernel == "dense":
        config.core = dense_sparse_mla(config.core)
    if kernel == "tilelang":
        config.core = tilelang_sparse_mla(config.core)
        config.indexer.selector = triton_indexer(config.indexer.selector)
    return build(config)


@pytest.mark.parametrize("kernel", ["tilelang", "dense"])
@pytest.mark.parametrize("chunk_tokens", [None, 64])
def test_a_mixer_on_kernels_has_the_outputs_and_gradients_of_the_plain_one(
    kernel: str, chunk_tokens: int | None, kernels: tuple[Gathering, Sorting]
) -> None:
    lengths = (130, 70)
    results = [
        gradients(made, runner(made, lengths), draw(200))
        for made in (part("torch", None), part(kernel, chunk_tokens))
    ]
    torch.testing.assert_close(results[1][0], results[0][0])
    for name, wanted in results[0][1].items():
        found = results[1][1][name]
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(found, wanted, msg=name)


def test_a_chunked_mixer_runs_the_kernel_once_in_backward(
    kernels: tuple[Gathering, Sorting],
) -> None:
    """A piece's graph is short-lived, so it keeps what the kernel made."""
    chunked = part("tilelang", 64)
    gradients(chunked, runner(chunked, (130, 70)), draw(200))
    assert kernels[0].calls == ["forward"] * 4 + ["forward", "backward"] * 4
    assert kernels[1].queries == [64, 64, 64, 8]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = write_corpus(tmp_path_factory.mktemp("kernels") / "corpus")
    small = [o for o in small_overrides(corpus) if not o.startswith(("model=", "training.steps"))]
    return [
        "model=glm_flash_tiny", "model.sparse_mla_kernel=auto", "model.indexer_kernel=auto",
        "model.index_topk=16", "training.steps=2", *small,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, overrides: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train(folder, overrides)
    return folder


RUNS: dict[str, list[str]] = {
    "recomputed": ["components.layer_recompute.enabled=true", "debug.leak_guard=true"],
    "chunked": ["components.layer_recompute.enabled=true",
                "components.sublayer_chunking.enabled=true",
                "components.sublayer_chunking.chunk_tokens=64", "debug.memory_timeline=2"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_kernels_compute_learns_what_the_plain_one_does(
    name: str,
    tmp_path: Path,
    overrides: list[str],
    plain: Path,
    kernels: tuple[Gathering, Sorting],
) -> None:
    def look(trainer: RecipeTrainer) -> list[str]:
        trainer.train()
        modules = trainer.model_parts[0].named_modules()
        kinds = KernelSparseMlaCore | KernelPoolSelector
        return [name for name, module in modules if isinstance(module, kinds)]

    found = train(tmp_path, [*overrides, *RUNS[name]], use=look)
    assert [n.replace("_checkpoint_wrapped_module.", "") for n in sorted(found)] == [
        "layers.3.attention.core", "layers.3.attention.indexer.selector",
    ]  # fmt: skip
    assert losses(tmp_path) == pytest.approx(losses(plain), rel=1e-4)
    # Two passes' worth of tokens: pools are chosen once, whatever is recomputed.
    assert sum(kernels[1].queries) == 2 * 256


def test_the_default_chunk_is_the_operations() -> None:
    assert GlmFlashModel().sparse_mla_chunk == sparse_mla.CHUNK_BYTES


@pytest.mark.parametrize("kernel", ["torch", "tilelang", "dense"])
def test_gradients_for_callers_without_a_graph_are_those_of_the_graph(
    kernel: str, kernels: tuple[Gathering, Sorting]
) -> None:
    """Of fewer queries than there are latents, as ranks have that share a sequence."""
    core = part(kernel, None).core
    tokens, rank, heads, make = 40, 16, 4, partial(torch.randn, dtype=torch.float64)
    pools = torch.tensor([[0, 2, -1]] * 8, dtype=torch.int32)
    place = pools, torch.arange(32, 40), torch.zeros(8, dtype=torch.int64)
    q, latent = make(8, heads, 8), make(tokens, rank)
    kv_b = make(heads * 16, rank)
    leaves = [tensor.requires_grad_() for tensor in (q, latent, kv_b)]
    out = core.attend(*leaves, place, False)
    grad_out = torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, grad_out)
    found = core.gradients(grad_out, *(leaf.detach() for leaf in leaves), place)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)
