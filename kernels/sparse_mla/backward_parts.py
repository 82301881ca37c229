# mypy: ignore-errors
"""Parts of the backward kernel with three warpgroups: the products of dK and their additions."""

from types import SimpleNamespace

import tilelang.language as T

from kernels.sparse_mla.shape import TILE, Shape

PIECE = 64
"""Columns of dK at a time where additions run beneath products."""


def additions(width: int, scatter: str) -> SimpleNamespace:
    """Macros that add a warpgroup's part of dK to float32 rows, and their ``rows`` from ``target``.

    ``add(full, acc, row, other, held, column, out)`` adds ``acc`` (TILE, any multiple of 32
    columns) to columns from ``column``. ``full``: no row is below 0; rows below are left out.

    Args:
        width: columns of ``out``.
        scatter: see ``kernels.sparse_mla.backward_split.build``.
    """

    @T.macro
    def add_quads(every, acc, row, held, column, out):
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            T.call_extern(
                "handle",
                f"add_quads<{every}>",
                T.address_of(held[0]),
                j // 8 % 2 * 4 + i % 16 // 8 * 2 + j % 2,
                acc[i, j],
                T.address_of(out[tuple([0] * len(out.shape))]),
                row[i],
                width,
                column + j // 16 * 16,
            )

    @T.macro
    def add_lines(every, acc, row, other, held, column, out):
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            T.call_extern(
                "handle",
                f"add_lines<{every}>",
                T.address_of(held[0]),
                j // 8 % 4 * 4 + i % 16 // 8 * 2 + j % 2,
                acc[i, j],
                T.address_of(out[tuple([0] * len(out.shape))]),
                row[i],
                other[i],
                width,
                column + j // 32 * 32,
            )

    @T.macro
    def add(full, acc, row, other, held, column, out):
        # Only the last tile has unused slots, and a test per addition costs a branch each.
        if scatter == "quads":
            if full:
                add_quads("true", acc, row, held, column, out)
            else:
                add_quads("false", acc, row, held, column, out)
        elif scatter == "lines":
            if full:
                add_lines("true", acc, row, other, held, column, out)
            else:
                add_lines("false", acc, row, other, held, column, out)
        elif scatter == "pairs":
            for i, j in T.Parallel(TILE, acc.shape[1]):
                if row[i] >= 0:
                    T.atomic_add(out[row[i], column + j], acc[i, j])
        else:
            for i, j in T.Parallel(TILE, acc.shape[1]):
                if row[i] >= 0:
                    out[row[i], column + j] = acc[i, j]

    @T.macro
    def rows(n, target, row, other):
        """Rows where dK goes; for ``lines`` those of the even and the odd row of each two."""
        if scatter == "lines":
            for i in T.Parallel(TILE):
                row[i] = target[n % 2, i - i % 2]
            for i in T.Parallel(TILE):
                other[i] = target[n % 2, i - i % 2 + 1]
        else:
            for i in T.Parallel(TILE):
                row[i] = target[n % 2, i]

    return SimpleNamespace(add=add, add_quads=add_quads, rows=rows)


def products(shape: Shape, adds: SimpleNamespace, *, ahead: bool):
    """The macro of a warpgroup's products of dQ and dK, with additions beneath products.

    dK is taken ``PIECE`` columns at a time: while the rows of one piece are added, the products of
    the next are under way, in the other of two accumulators.

    Args:
        shape: of the kernel.
        adds: from ``additions``.
        ahead: leave the last piece's additions, of ``acc_k[1]`` to ``row``, to the caller.
    """
    half = shape.width // 2
    pieces = half // PIECE
    added = pieces - ahead

    @T.macro
    def of_dk(left, right, acc, column, clear):
        T.wgmma_gemm(
            left, right[:, column : column + PIECE], acc, transpose_A=True, clear_accum=clear
        )

    @T.macro
    def run(
        side, n, t, count, Q_shared, G_shared, K_shared, P_shared, S_shared, target, ds_ready,
        k_free, p_free, acc_q, acc_k, row, other, held, dlatent,
    ):  # fmt: skip
        first = side * half
        # The first warpgroup fills its wait for dS; the second has just written it and lets go of
        # the keys first.
        if side == 0:
            of_dk(P_shared, G_shared, acc_k[0], first, True)
        T.barrier_wait(ds_ready, n & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(S_shared, K_shared[:, first : first + half], acc_q)
        if side == 1:
            of_dk(P_shared, G_shared, acc_k[0], first, True)
        of_dk(S_shared, Q_shared, acc_k[0], first, False)
        of_dk(P_shared, G_shared, acc_k[1], first + PIECE, True)
        of_dk(S_shared, Q_shared, acc_k[1], first + PIECE, False)
        T.wait_wgmma(3 + side)
        T.barrier_arrive(k_free)
        T.wait_wgmma(2)
        adds.rows(n, target, row, other)
        for piece in list(range(pieces)):
            if piece == pieces - 1:
                T.barrier_arrive(p_free)
            if piece < added:
                adds.add(
                    (t + 1) * TILE <= count, acc_k[piece % 2], row, other, held,
                    first + piece * PIECE, dlatent,
                )  # fmt: skip
            if piece + 2 < pieces:
                of_dk(P_shared, G_shared, acc_k[piece % 2], first + (piece + 2) * PIECE, True)
                of_dk(S_shared, Q_shared, acc_k[piece % 2], first + (piece + 2) * PIECE, False)
                T.wait_wgmma(2)
            elif piece + 2 == pieces:
                T.wait_wgmma(0)

    return run
