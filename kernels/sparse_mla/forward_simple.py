# mypy: ignore-errors
"""The forward kernel as the compiler schedules it: one query and 64 heads per block.

No explicit barriers, and a tail of columns that only keys have. Slower than ``forward_split``.
"""

import tilelang.language as T

from kernels.sparse_mla.shape import HEADS, LOG2E, TILE, Shape


def build(shape: Shape, *, threads: int):
    """The TileLang function; arguments as ``kernels.sparse_mla.tilelang_forward.forward`` calls it.

    Args:
        shape: what to compile for.
        threads: of a block, 256 or 128.
    """
    width, tail, size, scale = shape.width, shape.tail, shape.size, shape.scale
    heads, groups, steps = shape.heads, TILE // shape.size, shape.scale * LOG2E
    columns = width + tail
    queries, tokens, slots = T.dynamic("queries, tokens, slots")
    blocks = heads // HEADS

    @T.prim_func
    def sparse_mla_forward_simple(
        q: T.Tensor((queries, heads, columns), "bfloat16"),
        latent: T.Tensor((tokens, columns), "bfloat16"),
        pools: T.Tensor((queries, slots), "int32"),
        plan: T.Tensor((queries, 4), "int32"),
        out: T.Tensor((queries, heads, width), "bfloat16"),
        lse: T.Tensor((queries, heads), "float32"),
    ):
        with T.Kernel(queries * blocks, threads=threads) as block:
            # Blocks that gather the same keys are neighbours.
            query = block // blocks
            head_block = block % blocks
            Q_shared = T.alloc_shared((HEADS, width), "bfloat16")
            K_shared = T.alloc_shared((TILE, width), "bfloat16")
            if tail:
                Q_tail = T.alloc_shared((HEADS, tail), "bfloat16")
                K_tail = T.alloc_shared((TILE, tail), "bfloat16")
            P_shared = T.alloc_shared((HEADS, TILE), "bfloat16")
            token = T.alloc_shared((TILE,), "int32")
            acc_o = T.alloc_fragment((HEADS, width), "float32")
            acc_s = T.alloc_fragment((HEADS, TILE), "float32")
            top = T.alloc_fragment((HEADS,), "float32")
            factor = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_fragment((HEADS,), "float32")
            row = T.alloc_fragment((HEADS,), "float32")

            first_head = head_block * HEADS
            used = plan[query, 0]
            count = plan[query, 1]
            start = plan[query, 2]
            unfinished = plan[query, 3]

            T.copy(q[query, first_head : first_head + HEADS, :width], Q_shared)
            if tail:
                T.copy(q[query, first_head : first_head + HEADS, width:], Q_tail)
            T.fill(acc_o, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            for t in T.serial(T.ceildiv(count, TILE)):
                for j in T.Parallel(TILE):
                    group = t * groups + j // size
                    token[j] = (
                        T.if_then_else(
                            group < used,
                            start + pools[query, T.min(group, slots - 1)] * size,
                            unfinished,
                        )
                        + j % size
                    )
                for j, d in T.Parallel(TILE, width):
                    K_shared[j, d] = T.if_then_else(
                        t * TILE + j < count, latent[token[j], d], T.cast(0, "bfloat16")
                    )
                if tail:
                    for j, d in T.Parallel(TILE, tail):
                        K_tail[j, d] = T.if_then_else(
                            t * TILE + j < count, latent[token[j], width + d], T.cast(0, "bfloat16")
                        )
                T.gemm(
                    Q_shared,
                    K_shared,
                    acc_s,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullCol,
                    clear_accum=True,
                )
                if tail:
                    T.gemm(Q_tail, K_tail, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(HEADS, TILE):
                    acc_s[i, j] = T.if_then_else(
                        t * TILE + j < count, acc_s[i, j], -T.infinity("float32")
                    )
                # Every tile has a used slot, so the largest logit is finite from the first on.
                T.copy(top, factor)
                T.reduce_max(acc_s, top, dim=1, clear=False)
                for i, j in T.Parallel(HEADS, TILE):
                    acc_s[i, j] = T.exp2(acc_s[i, j] * steps - top[i] * steps)
                for i in T.Parallel(HEADS):
                    factor[i] = T.exp2(factor[i] * steps - top[i] * steps)
                T.reduce_sum(acc_s, row, dim=1)
                for i in T.Parallel(HEADS):
                    total[i] = total[i] * factor[i] + row[i]
                for i, j in T.Parallel(HEADS, width):
                    acc_o[i, j] *= factor[i]
                T.copy(acc_s, P_shared)
                T.gemm(P_shared, K_shared, acc_o, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(HEADS, width):
                acc_o[i, j] = T.if_then_else(total[i] > 0, acc_o[i, j] / total[i], 0.0)
            T.copy(acc_o, Q_shared)
            T.copy(Q_shared, out[query, first_head : first_head + HEADS, :])
            for i in T.Parallel(HEADS):
                total[i] = T.if_then_else(
                    total[i] > 0, T.log(total[i]) + top[i] * scale, -T.infinity("float32")
                )
            T.copy(total, lse[query, first_head : first_head + HEADS])

    return sparse_mla_forward_simple
