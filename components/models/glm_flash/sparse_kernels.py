"""Kernels in place of the plain parts of sparse attention, through torchtitan's overrides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torchtitan.config import derive, override

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import IndexerInputs, PoolSelector
from components.models.glm_flash.mla import Place, SparseMlaCore
from components.models.settings import KernelChoice
from kernels.backends.ops import INDEXER, SPARSE_MLA, IndexerKernels
from kernels.backends.registry import ITEMSIZE, REFERENCE, Choice
from kernels.dsa import dense, sparse_mla
from kernels.dsa.sparse_mla_kl import Student, sparse_mla_kl
from kernels.precision import accumulation_dtype

if TYPE_CHECKING:
    from components.models.glm_flash.settings import GlmFlashModel


_BLOCK = 4096
"""Queries that ranks deal out to each other at a time: enough to fill a GPU, few enough that eight
ranks have four turns at 128K tokens."""


class KernelSparseMlaCore(SparseMlaCore):
    """Attention by a kernel for the absorbed form."""

    @dataclass(kw_only=True, slots=True)
    class Config(SparseMlaCore.Config):
        backend: str
        """A name in ``SPARSE_MLA.backends``."""

    teaches = True
    config: Config

    def attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
        transient: bool,
    ) -> torch.Tensor:
        """See ``kernels.dsa.sparse_mla.sparse_mla``."""
        settings = self.config
        return sparse_mla.sparse_mla(
            q, latent, kv_b, *place, size=settings.kpool, scale=settings.scale,
            backend=settings.backend, chunk_bytes=settings.chunk_bytes, keep=transient,
        )  # fmt: skip

    def gradients(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``SparseMlaCore.gradients``."""
        settings, nothing = self.config, q.new_empty(0)
        return sparse_mla.run_backward(
            grad_out, q, latent, kv_b, *place, nothing, nothing, settings.kpool, settings.scale,
            settings.backend, settings.chunk_bytes,
        )[:3]  # fmt: skip

    def teach(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
        student: Student,
    ) -> torch.Tensor:
        """See ``SparseMlaCore.teach``."""
        settings = self.config
        return sparse_mla_kl(
            q, latent, kv_b, *place, student, size=settings.kpool, scale=settings.scale,
            backend=settings.backend, chunk_bytes=settings.chunk_bytes,
        )  # fmt: skip


class DenseSparseMlaCore(SparseMlaCore):
    """Masked dense attention: the baseline."""

    @dataclass(kw_only=True, slots=True)
    class Config(SparseMlaCore.Config):
        pass

    def attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
        transient: bool,
    ) -> torch.Tensor:
        """See ``kernels.dsa.dense.sparse_mla``."""
        settings = self.config
        return dense.sparse_mla(
            q, latent, kv_b, *place, size=settings.kpool, scale=settings.scale,
            chunk_bytes=settings.chunk_bytes,
        )  # fmt: skip

    def gradients(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``SparseMlaCore.gradients``."""
        wide = latent.to(accumulation_dtype(latent.dtype))
        q, wide, kv_b = (tensor.detach().requires_grad_() for tensor in (q, wide, kv_b))
        with torch.enable_grad():
            out = self.attend(q, wide, kv_b, place, True)
        of_q, of_latent, of_kv_b = torch.autograd.grad(out, (q, wide, kv_b), grad_out)
        return of_q, of_latent, of_kv_b


class KernelPoolSelector(PoolSelector):
    """Scoring and selection by a kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(PoolSelector.Config):
        backend: str
        """A name in ``INDEXER.backends``."""

    config: Config

    def blocks(
        self, lengths: tuple[int, ...], begin: int, stop: int, heads: int
    ) -> list[tuple[int, int]]:
        """See ``PoolSelector.blocks``. A kernel's rows depend on no cut, so blocks are even."""
        total = stop - begin
        return [(b, min(b + _BLOCK, total)) for b in range(0, total, _BLOCK)]

    def forward(self, inputs: IndexerInputs, documents: Documents, begin: int) -> torch.Tensor:
        """See ``PoolSelector.forward``."""
        settings = self.config
        kernels: IndexerKernels = INDEXER.load(settings.backend)
        return INDEXER.guard(settings.backend, kernels.select_pools)(
            inputs.queries, inputs.weights, inputs.keys, inputs.pools, documents.position,
            documents.lengths, size=settings.kpool, count=self.count, scale=settings.scale,
            begin=begin, key_factors=inputs.key_factors,
        )  # fmt: skip


@override(target=SparseMlaCore.Config, description="sparse attention in TileLang")
def tilelang_sparse_mla(cfg: SparseMlaCore.Config) -> KernelSparseMlaCore.Config:
    return derive(cfg, KernelSparseMlaCore.Config, backend="tilelang")


@override(target=SparseMlaCore.Config, description="sparse attention as masked dense attention")
def dense_sparse_mla(cfg: SparseMlaCore.Config) -> DenseSparseMlaCore.Config:
    return derive(cfg, DenseSparseMlaCore.Config)


@override(target=PoolSelector.Config, description="selection of pools in Triton")
def triton_indexer(cfg: PoolSelector.Config) -> KernelPoolSelector.Config:
    return derive(cfg, KernelPoolSelector.Config, backend="triton")


_SPARSE_MLA = {"tilelang": tilelang_sparse_mla, "dense": dense_sparse_mla}
_INDEXER = {"triton": triton_indexer}


def choose_sparse_mla(model: "GlmFlashModel", device: str, itemsize: int) -> Choice:
    """What computes sparse attention. See ``Operation.choose``."""
    shape = {
        "model.n_heads": model.n_heads,
        "model.kv_lora_rank": model.kv_lora_rank,
        "model.index_kpool": model.index_kpool,
        "model.index_topk": model.index_topk,
        ITEMSIZE: itemsize,
    }
    return SPARSE_MLA.choose(model.sparse_mla_kernel, device, shape)


def choose_indexer(model: "GlmFlashModel", device: str, itemsize: int) -> Choice:
    """What scores and chooses pools. See ``Operation.choose``."""
    shape = {
        "model.index_n_heads": model.index_n_heads,
        "model.index_head_dim": model.index_head_dim,
        "model.index_kpool": model.index_kpool,
        "model.index_topk": model.index_topk,
        ITEMSIZE: itemsize,
    }
    return INDEXER.choose(model.indexer_kernel, device, shape)


def choose_sparse_kernels(model: "GlmFlashModel", device: str, itemsize: int) -> KernelChoice:
    """Both, for a model with sparse attention.

    Raises:
        ValueError: what the settings ask for cannot run there.
    """
    if "dsa" not in model.layer_types:
        return KernelChoice()
    attention = choose_sparse_mla(model, device, itemsize)
    indexer = choose_indexer(model, device, itemsize)
    chosen = (_SPARSE_MLA, attention.backend), (_INDEXER, indexer.backend)
    return KernelChoice(
        overrides=tuple(table[name] for table, name in chosen if name != REFERENCE),
        notes=(attention.note, indexer.note),
    )
