# mypy: ignore-errors
"""How the backward kernel with three warpgroups adds dK to float32 rows in memory.

A warp's addition takes a request to L2 for every line of 128 bytes that it touches: the fewer, the
faster. As wgmma leaves dK, four lanes hold 32 neighbouring bytes of a row: ``pairs`` adds those, of
eight rows at a time; ``quads`` 64 bytes of eight rows, after lanes of a row exchange columns;
``lines`` whole lines of four rows, after lanes of neighbouring rows exchange columns too.
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels.sparse_mla.shape import TILE


def additions(width: int, scatter: str) -> SimpleNamespace:
    """Macros that add a warpgroup's part of dK to float32 rows.

    ``rows(n, target, row, other)`` reads the rows of the n-th tile from ``target`` (2, TILE).
    ``add(full, acc, row, other, held, column, out)`` adds ``acc`` (TILE, any multiple of 32
    columns) to columns from ``column``. ``full``: no row is below 0; rows below are left out.
    ``add_quads(every, acc, row, held, column, out)`` adds any accumulator as ``quads`` does, where
    ``every`` is "true" or "false" for ``full``. ``held``: ``held_size`` numbers of each thread.

    Args:
        width: columns of ``out``.
        scatter: see ``kernels.sparse_mla.backward_split.build``.
    """

    held_size = 16 if scatter == "lines" else 8

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
        if scatter == "lines":
            if full:
                add_lines("true", acc, row, other, held, column, out)
            else:
                add_lines("false", acc, row, other, held, column, out)
        elif scatter == "quads":
            if full:
                add_quads("true", acc, row, held, column, out)
            else:
                add_quads("false", acc, row, held, column, out)
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

    return SimpleNamespace(add=add, add_quads=add_quads, rows=rows, held_size=held_size)
