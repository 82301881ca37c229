# mypy: ignore-errors
"""The backward kernel as the compiler schedules it: one query and 64 heads per block.

No explicit barriers, and a tail of columns that only keys have. Slower than ``backward_split``.
"""

import tilelang.language as T

from kernels.sparse_mla.shape import HEADS, LOG2E, TILE, Shape


def build(shape: Shape, *, emit: bool, scatter: str, threads: int):
    """The TileLang function; arguments as ``kernels.sparse_mla.tilelang_backward`` calls it.

    Args:
        shape: what to compile for.
        emit: also write the probabilities of the pools.
        scatter: ``pairs`` or ``store``, as in ``kernels.sparse_mla.backward_split``.
        threads: of a block, 256 or 128.
    """
    width, tail, size, scale = shape.width, shape.tail, shape.size, shape.scale
    heads, groups, steps = shape.heads, TILE // shape.size, shape.scale * LOG2E
    columns, cols = width + tail, 128
    full_columns = T.GemmWarpPolicy.FullCol
    queries, tokens, slots, targets = T.dynamic("queries, tokens, slots, targets")
    blocks = heads // HEADS

    @T.macro
    def add(acc_k, row, column, dlatent):
        for i, j in T.Parallel(acc_k.shape[0], acc_k.shape[1]):
            if row[i] >= 0:
                if scatter == "store":
                    dlatent[row[i], column + j] = acc_k[i, j]
                else:
                    T.atomic_add(dlatent[row[i], column + j], acc_k[i, j])

    @T.prim_func
    def sparse_mla_backward_simple(
        q: T.Tensor((queries, heads, columns), "bfloat16"),
        grad: T.Tensor((queries, heads, width), "bfloat16"),
        latent: T.Tensor((tokens, columns), "bfloat16"),
        pools: T.Tensor((queries, slots), "int32"),
        plan: T.Tensor((queries, 4), "int32"),
        lse: T.Tensor((queries, heads), "float32"),
        delta: T.Tensor((queries, heads), "float32"),
        dq: T.Tensor((queries, heads, columns), "bfloat16"),
        dlatent: T.Tensor((targets, columns), "float32"),
        mass: T.Tensor(T.dynamic("mass_blocks, mass_queries, mass_slots"), "float32"),
    ):
        with T.Kernel(queries * blocks, threads=threads) as block:
            # Blocks that gather the same keys are neighbours.
            query = block // blocks
            head_block = block % blocks
            Q_shared = T.alloc_shared((HEADS, width), "bfloat16")
            G_shared = T.alloc_shared((HEADS, width), "bfloat16")
            K_shared = T.alloc_shared((TILE, width), "bfloat16")
            if tail:
                Q_tail = T.alloc_shared((HEADS, tail), "bfloat16")
                K_tail = T.alloc_shared((TILE, tail), "bfloat16")
                acc_q_tail = T.alloc_fragment((HEADS, tail), "float32")
                acc_k_tail = T.alloc_fragment((TILE, tail), "float32")
                T.fill(acc_q_tail, 0)
            P_shared = T.alloc_shared((HEADS, TILE), "bfloat16")
            S_shared = T.alloc_shared((HEADS, TILE), "bfloat16")
            token = T.alloc_shared((TILE,), "int32")
            target = T.alloc_shared((TILE,), "int32")
            column = T.alloc_shared((TILE,), "float32")
            acc_q = T.alloc_fragment((HEADS, width), "float32")
            acc_k = T.alloc_fragment((TILE, cols), "float32")
            acc_p = T.alloc_fragment((HEADS, TILE), "float32")
            acc_s = T.alloc_fragment((HEADS, TILE), "float32")
            shift = T.alloc_fragment((HEADS,), "float32")
            inner = T.alloc_fragment((HEADS,), "float32")
            sums = T.alloc_fragment((TILE,), "float32")

            first_head = head_block * HEADS
            used = plan[query, 0]
            count = plan[query, 1]
            start = plan[query, 2]
            unfinished = plan[query, 3]
            per_query = T.ceildiv(slots * size + size - 1, TILE) * TILE
            first_row = (head_block * queries + query) * per_query

            T.copy(q[query, first_head : first_head + HEADS, :width], Q_shared)
            if tail:
                T.copy(q[query, first_head : first_head + HEADS, width:], Q_tail)
            T.copy(grad[query, first_head : first_head + HEADS, :], G_shared)
            T.copy(lse[query, first_head : first_head + HEADS], shift)
            T.copy(delta[query, first_head : first_head + HEADS], inner)
            for i in T.Parallel(HEADS):
                shift[i] = shift[i] * LOG2E
            T.fill(acc_q, 0)
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
                for j in T.Parallel(TILE):
                    target[j] = T.if_then_else(
                        t * TILE + j < count,
                        token[j] if scatter != "store" else first_row + t * TILE + j,
                        -1,
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
                    Q_shared, K_shared, acc_p, transpose_B=True, policy=full_columns,
                    clear_accum=True,
                )  # fmt: skip
                if tail:
                    T.gemm(Q_tail, K_tail, acc_p, transpose_B=True, policy=full_columns)
                for i, j in T.Parallel(HEADS, TILE):
                    acc_p[i, j] = T.if_then_else(
                        t * TILE + j < count, T.exp2(acc_p[i, j] * steps - shift[i]), 0.0
                    )
                T.gemm(
                    G_shared, K_shared, acc_s, transpose_B=True, policy=full_columns,
                    clear_accum=True,
                )  # fmt: skip
                for i, j in T.Parallel(HEADS, TILE):
                    acc_s[i, j] = acc_p[i, j] * (acc_s[i, j] - inner[i]) * scale
                T.copy(acc_p, P_shared)
                T.copy(acc_s, S_shared)
                if emit:
                    T.reduce_sum(acc_p, sums, dim=0)
                    T.copy(sums, column)
                    for j in T.Parallel(TILE):
                        if j % size == 0 and t * groups + j // size < used:
                            total = T.alloc_var("float32", init=0.0)
                            for s in T.serial(size):
                                total = total + column[j + s]
                            mass[head_block, query, t * groups + j // size] = total
                T.gemm(S_shared, K_shared, acc_q, policy=full_columns)
                for c in T.unroll(width // cols):
                    T.gemm(
                        P_shared, G_shared[:, c * cols : (c + 1) * cols], acc_k, transpose_A=True,
                        policy=full_columns, clear_accum=True,
                    )  # fmt: skip
                    T.gemm(
                        S_shared, Q_shared[:, c * cols : (c + 1) * cols], acc_k, transpose_A=True,
                        policy=full_columns,
                    )  # fmt: skip
                    add(acc_k, target, c * cols, dlatent)
                if tail:
                    T.gemm(S_shared, K_tail, acc_q_tail, policy=full_columns)
                    T.gemm(
                        S_shared, Q_tail, acc_k_tail, transpose_A=True, policy=full_columns,
                        clear_accum=True,
                    )  # fmt: skip
                    add(acc_k_tail, target, width, dlatent)
            T.copy(acc_q, Q_shared)
            T.copy(Q_shared, dq[query, first_head : first_head + HEADS, :width])
            if tail:
                T.copy(acc_q_tail, Q_tail)
                T.copy(Q_tail, dq[query, first_head : first_head + HEADS, width:])

    return sparse_mla_backward_simple
