"""The operations that have several implementations, and what each implementation must offer.

To offer another: write a ``Backend`` whose ``load`` returns what the operation's protocol asks for,
and ``add`` it. The name then becomes legal under the operation's configuration key.
"""

import importlib
import importlib.util
from typing import Protocol

import torch

from kernels.backends import machine
from kernels.backends.registry import Backend, Operation, Shape


class SparseMlaKernels(Protocol):
    """Attention of absorbed queries over latents; no autograd.

    Tensors: q, out and their gradients (Q, heads, r) of one 16-bit dtype; latent (T, r) of the
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
        out: torch.Tensor,
        grad_out: torch.Tensor,
        lse: torch.Tensor,
        pools: torch.Tensor,
        position: torch.Tensor,
        start: torch.Tensor,
        grad_latent: torch.Tensor,
        *,
        size: int,
        scale: float,
        deterministic: bool,
    ) -> torch.Tensor:
        """The gradient of q; adds that of the latents to ``grad_latent``, float32 (T, r)."""
        ...


class IndexerKernels(Protocol):
    """Scoring and selection of pools; no autograd."""

    def select(
        self,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        first: torch.Tensor,
        end: torch.Tensor,
        *,
        count: int,
        scale: float,
    ) -> torch.Tensor:
        """Choose pools, exactly and with ties to the lowest.

        Args:
            queries: (Q, heads, d) in a 16-bit dtype.
            weights: (Q, heads) float32, signed.
            keys: (P, d), all pools of the batch.
            first: int64 (Q,), number of the first pool of each query's document.
            end: int64 (Q,), one after the last pool that the query may choose; not below ``first``.
            count: pools per query, at most.
            scale: factor on every product of query and key.

        Returns:
            int32 (Q, count): document-relative, ascending, then -1. A query's row depends on
            nothing but its own inputs and the keys, to the bit.
        """
        ...


def _exists(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _written_in(package: str, where: str) -> Backend:
    """A backend written in ``package`` ("tilelang", "triton").

    Args:
        where: holds ``limits``, cheap to import, with ``unsupported(shape) -> str | None``, and
            ``kernels``, which follows the operation's protocol.
    """

    def why_not(device: str, shape: Shape) -> str | None:
        reason = machine.why_not(package, device, shape)
        if reason is None and not _exists(where):
            reason = f"this version comes without {where}"
        if reason is None:
            reason = importlib.import_module(f"{where}.limits").unsupported(shape)
        return reason

    return Backend(
        name=package,
        load=lambda: importlib.import_module(f"{where}.kernels"),
        why_not=why_not,
        automatic=True,
    )


SPARSE_MLA = Operation("sparse_mla", "model.sparse_mla_kernel")
INDEXER = Operation("indexer", "model.indexer_kernel")

SPARSE_MLA.add(_written_in("tilelang", "kernels.sparse_mla"))
SPARSE_MLA.add(Backend("dense", lambda: importlib.import_module("kernels.dsa.dense")))
INDEXER.add(_written_in("triton", "kernels.indexer"))
