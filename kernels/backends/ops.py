"""The operations that have several implementations, and what each implementation must offer.

To offer another: write a ``Backend`` whose ``load`` returns what the operation's protocol asks for,
``add`` it, and give its name a place among the settings (``SparseMlaKernel``, ``IndexerKernel``,
``HyperConnectionsKernel``) and in the tables of ``components.models.glm_flash``'s
``sparse_kernels`` and ``fused_connections``.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from kernels.backends import machine
from kernels.backends.machine import Gpus
from kernels.backends.registry import Backend, Operation, Shape
from kernels.dsa.pooling import Pools
from kernels.hyper_connections.merge import MadeOf
from kernels.hyper_connections.naive import Constants


class SparseMlaKernels(Protocol):
    """Attention of absorbed queries over latents; no autograd.

    Tensors: q, out and their gradients (Q, heads, r) in bfloat16; latent (T, r) of the
    same; lse (Q, heads) float32, natural logarithm; pools int32 (Q, n), document-relative,
    ascending, then -1; position and start int64 (Q,).
    """

    def forward(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        pools: torch.Tensor,
        position: torch.Tensor,
        start: torch.Tensor,
        *,
        size: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's output in the latent, and lse."""
        ...

    def backward(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        pools: torch.Tensor,
        position: torch.Tensor,
        start: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad: torch.Tensor,
        dlatent: torch.Tensor,
        *,
        size: int,
        scale: float,
        probabilities: bool,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of q; ``grad`` is that of ``out``, and the latents' is added to ``dlatent``,
        float32 (T, r). With ``probabilities`` also float32 (Q, n), each pool's probability summed
        over heads and the pool's tokens, 0 where there is no pool; otherwise None."""
        ...


class IndexerKernels(Protocol):
    """Scoring and selection of pools; without gradients."""

    def select_pools(
        self,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        pools: Pools,
        position: torch.Tensor,
        lengths: tuple[int, ...],
        *,
        size: int,
        count: int,
        scale: float,
        begin: int = 0,
        key_factors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``kernels.dsa.select.select_pools``. A query's row depends on nothing but its own
        inputs and the keys, to the bit: not on the other queries of the call."""
        ...


class HyperConnectionKernels(Protocol):
    """One site of the residual streams, with gradients. See ``kernels.hyper_connections.fused``."""

    def map_and_read(
        self,
        streams: torch.Tensor,
        fn: torch.Tensor,
        terms: torch.Tensor,
        constants: Constants,
        made_of: MadeOf,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A mixer's input, the streams for ``merge``, and two of the three maps."""
        ...

    def merge(
        self,
        streams: torch.Tensor,
        out: torch.Tensor,
        post: torch.Tensor,
        mix: torch.Tensor,
        made_of: MadeOf,
        unread: bool,
    ) -> torch.Tensor:
        """The streams after the mixer."""
        ...


Limits = Callable[[Shape], str | None]
"""Which of a shape's values a kernel does not take, and what it takes; None: all."""


def multiple_of(key: str, unit: int, shape: Shape) -> str | None:
    """A limit: the value at ``key`` is a multiple of ``unit``."""
    if shape[key] % unit == 0:
        return None
    return f"{key}: {shape[key]} is not taken; supported: multiples of {unit}"


def one_of(key: str, values: tuple[int, ...], shape: Shape) -> str | None:
    """A limit: the value at ``key`` is one of ``values``."""
    if shape[key] in values:
        return None
    return f"{key}: {shape[key]} is not taken; supported: {', '.join(map(str, values))}"


def _sparse_mla_limits(shape: Shape) -> str | None:
    limits = importlib.import_module("kernels.sparse_mla.shape")
    return (
        multiple_of("model.n_heads", limits.HEADS, shape)
        or one_of("model.kv_lora_rank", limits.WIDTHS, shape)
        or one_of("model.index_kpool", limits.SIZES, shape)
    )


def _indexer_limits(shape: Shape) -> str | None:
    limits = importlib.import_module("kernels.indexer.op")
    reason = one_of("model.index_n_heads", limits.HEADS, shape) or one_of(
        "model.index_head_dim", limits.DIMS, shape
    )
    most = limits.MOST_CHOSEN * shape["model.index_kpool"]
    if reason is None and shape["model.index_topk"] > most:
        reason = f"model.index_topk: {shape['model.index_topk']} is not taken; supported: to {most}"
    return reason


def _hyper_connections_limits(shape: Shape) -> str | None:
    return one_of(
        "model.hc_mult", importlib.import_module("kernels.hyper_connections.op").STREAMS, shape
    )


def _hyper_connections() -> HyperConnectionKernels:
    return importlib.import_module("kernels.hyper_connections.fused")


def _sparse_mla() -> SimpleNamespace:
    forward = importlib.import_module("kernels.sparse_mla.tilelang_forward").forward
    backward = importlib.import_module("kernels.sparse_mla.tilelang_backward").backward
    return SimpleNamespace(forward=forward, backward=backward)


def _indexer() -> IndexerKernels:
    return importlib.import_module("kernels.indexer.op")


def kernel(package: str, gpus: Gpus, load: Callable[[], Any], limits: Limits) -> Backend:
    """A backend that "auto" takes where it runs.

    Args:
        package: that it is written in, "tilelang" or "triton"; its name in recipes.
        gpus: that it runs on.
        load, limits: see ``Backend`` and ``Limits``.
    """

    def why_not(device: str, shape: Shape) -> str | None:
        reason = machine.why_not(package, device, gpus, shape)
        return reason or limits(shape)

    return Backend(name=package, load=load, why_not=why_not, automatic=True)


SPARSE_MLA = Operation("sparse_mla", "model.sparse_mla_kernel")
INDEXER = Operation("indexer", "model.indexer_kernel")
HYPER_CONNECTIONS = Operation("hyper_connections", "model.hyper_connections_kernel")

SPARSE_MLA.add(kernel("tilelang", machine.HOPPER, _sparse_mla, _sparse_mla_limits))
SPARSE_MLA.add(Backend("dense", lambda: importlib.import_module("kernels.dsa.dense")))
INDEXER.add(kernel("triton", machine.AMPERE_ON, _indexer, _indexer_limits))
HYPER_CONNECTIONS.add(
    kernel("triton", machine.AMPERE_ON, _hyper_connections, _hyper_connections_limits)
)
