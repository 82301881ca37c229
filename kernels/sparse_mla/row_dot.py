# mypy: ignore-errors
"""The rows' inner products of outputs and their gradients, before the backward kernel."""

import tilelang.language as T

from kernels.sparse_mla.shape import HEADS, Shape


def build(shape: Shape, *, threads: int):
    """The TileLang function ``(out, grad, delta)``: ``delta[q, h] = <out[q, h], grad[q, h]>``.

    Args:
        shape: what to compile for.
        threads: of a block; a block takes 64 heads of a query.
    """
    heads, width, cols = shape.heads, shape.width, 128
    queries = T.dynamic("queries")
    blocks = heads // HEADS

    @T.prim_func
    def sparse_mla_row_dot(
        out: T.Tensor((queries, heads, width), "bfloat16"),
        grad: T.Tensor((queries, heads, width), "bfloat16"),
        delta: T.Tensor((queries, heads), "float32"),
    ):
        with T.Kernel(queries * blocks, threads=threads) as block:
            # Blocks that gather the same keys are neighbours.
            query = block // blocks
            head_block = block % blocks
            a = T.alloc_fragment((HEADS, cols), "bfloat16")
            b = T.alloc_fragment((HEADS, cols), "bfloat16")
            product = T.alloc_fragment((HEADS, cols), "float32")
            sums = T.alloc_fragment((HEADS,), "float32")
            first_head = head_block * HEADS
            T.fill(product, 0)
            for c in T.unroll(width // cols):
                T.copy(out[query, first_head : first_head + HEADS, c * cols : (c + 1) * cols], a)
                T.copy(grad[query, first_head : first_head + HEADS, c * cols : (c + 1) * cols], b)
                for i, j in T.Parallel(HEADS, cols):
                    product[i, j] += T.cast(a[i, j], "float32") * T.cast(b[i, j], "float32")
            T.reduce_sum(product, sums, dim=1)
            T.copy(sums, delta[query, first_head : first_head + HEADS])

    return sparse_mla_row_dot
