# mypy: ignore-errors
"""The forward kernel whose two warpgroups split the width: one query and 64 heads per block.

Each warpgroup owns one half of the latent's columns: it multiplies that half of queries and keys,
hands its partial logits to the other through shared memory, computes the softmax of the sum, and
multiplies the probabilities, still in registers, with its half of the values. So a tile of keys is
held for one round only, and the next one is gathered meanwhile by a third warpgroup, row by row
with 16-byte copies. Shared memory: queries 64 KiB, two tiles of keys 128 KiB, logits 32 KiB.
"""

import tilelang.language as T

from kernels.sparse_mla.shape import HEADS, LOG2E, TILE, Shape


def build(shape: Shape, *, consumer_registers: int, producer_registers: int):
    """The TileLang function; arguments as ``kernels.sparse_mla.tilelang_forward.forward`` calls it.

    Args:
        shape: ``tail`` must be 0.
        consumer_registers, producer_registers: per thread of the two warpgroups that compute and
            of the one that loads; 504 together, counting the first twice, is what a block has.
    """
    width, size, scale = shape.width, shape.size, shape.scale
    heads, half, groups = shape.heads, shape.width // 2, TILE // shape.size
    steps = shape.scale * LOG2E
    rows = TILE // 16
    queries, tokens, slots = T.dynamic("queries, tokens, slots")
    blocks = heads // HEADS

    @T.macro
    def multiply_queries(side, t, Q_shared, K_shared, ready, acc_s):
        T.barrier_wait(ready[t % 2], (t // 2) & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(
            Q_shared[:, side * half : (side + 1) * half],
            K_shared[t % 2, :, side * half : (side + 1) * half],
            acc_s,
            transpose_B=True,
            clear_accum=True,
        )

    @T.macro
    def attend(
        side, Q_shared, K_shared, part, ready, free, part_ready, part_free, count, tiles, query,
        first_head, acc_o, acc_s, p, top, factor, total, row, grown, out, lse,
    ):  # fmt: skip
        T.set_max_nreg(consumer_registers, 1)
        T.fill(acc_o, 0)
        T.fill(total, 0)
        T.fill(top, -T.infinity("float32"))
        if tiles > 0:
            multiply_queries(side, 0, Q_shared, K_shared, ready, acc_s)
            T.wait_wgmma(0)
        for t in T.serial(tiles):
            # Both warpgroups hold logits alike, so what a thread needs was in the thread of the
            # same number. In this order neighbouring threads touch neighbouring words.
            T.barrier_wait(part_free[side], (t & 1) ^ 1)
            for i, j in T.Parallel(HEADS, TILE):
                part[
                    side,
                    j // 8 * 2 + i % 16 // 8,
                    i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
                    j % 2,
                ] = acc_s[i, j]
            T.barrier_arrive(part_ready[side])
            T.barrier_wait(part_ready[1 - side], t & 1)
            for i, j in T.Parallel(HEADS, TILE):
                acc_s[i, j] += part[
                    1 - side,
                    j // 8 * 2 + i % 16 // 8,
                    i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
                    j % 2,
                ]
            T.barrier_arrive(part_free[1 - side])
            if t == tiles - 1:
                for i, j in T.Parallel(HEADS, TILE):
                    acc_s[i, j] = T.if_then_else(
                        t * TILE + j < count, acc_s[i, j], -T.infinity("float32")
                    )
            # What is subtracted in the exponent need not be the largest logit: it follows only a
            # growth by more than 2^8, so sums are seldom rescaled. Every tile has a used slot,
            # so it is finite from the first tile on.
            T.reduce_max(acc_s, row, dim=1)
            grown[0] = 0
            for i in T.Parallel(HEADS):
                factor[i] = 1.0
                if (row[i] - top[i]) * steps > 8.0:
                    factor[i] = T.exp2((top[i] - row[i]) * steps)
                    top[i] = row[i]
                    grown[0] = 1
            for i, j in T.Parallel(HEADS, TILE):
                acc_s[i, j] = T.exp2(acc_s[i, j] * steps - top[i] * steps)
            T.reduce_sum(acc_s, row, dim=1)
            for i in T.Parallel(HEADS):
                total[i] = total[i] * factor[i] + row[i]
            T.copy(acc_s, p)
            if grown[0] != 0:
                for i, j in T.Parallel(HEADS, half):
                    acc_o[i, j] *= factor[i]
            T.wgmma_gemm(p, K_shared[t % 2, :, side * half : (side + 1) * half], acc_o)
            # The next logits follow at once; this tile is free when its values are multiplied.
            if t + 1 < tiles:
                multiply_queries(side, t + 1, Q_shared, K_shared, ready, acc_s)
                T.wait_wgmma(1)
                T.barrier_arrive(free[t % 2])
            T.wait_wgmma(0)
        for i in T.Parallel(HEADS):
            factor[i] = T.if_then_else(total[i] > 0, 1.0 / total[i], 0.0)
        for i, j in T.Parallel(HEADS, half):
            acc_o[i, j] *= factor[i]
        # This half of the queries is read by this warpgroup alone.
        T.copy(acc_o, Q_shared[:, side * half : (side + 1) * half])
        T.copy(
            Q_shared[:, side * half : (side + 1) * half],
            out[query, first_head : first_head + HEADS, side * half : (side + 1) * half],
        )
        if side == 0:
            for i in T.Parallel(HEADS):
                total[i] = T.if_then_else(
                    total[i] > 0, T.log(total[i]) + top[i] * scale, -T.infinity("float32")
                )
            T.copy(total, lse[query, first_head : first_head + HEADS])

    @T.prim_func
    def sparse_mla_forward_split(
        q: T.Tensor((queries, heads, width), "bfloat16"),
        latent: T.Tensor((tokens, width), "bfloat16"),
        pools: T.Tensor((queries, slots), "int32"),
        plan: T.Tensor((queries, 4), "int32"),
        out: T.Tensor((queries, heads, width), "bfloat16"),
        lse: T.Tensor((queries, heads), "float32"),
    ):
        with T.Kernel(queries * blocks, threads=384) as block:
            # Blocks that gather the same keys are neighbours.
            query = block // blocks
            head_block = block % blocks
            Q_shared = T.alloc_shared((HEADS, width), "bfloat16")
            K_shared = T.alloc_shared((2, TILE, width), "bfloat16")
            part = T.alloc_shared((2, TILE // 4, 128, 2), "float32")
            acc_o_0 = T.alloc_fragment((HEADS, half), "float32")
            acc_o_1 = T.alloc_fragment((HEADS, half), "float32")
            acc_s_0 = T.alloc_fragment((HEADS, TILE), "float32")
            acc_s_1 = T.alloc_fragment((HEADS, TILE), "float32")
            p_0 = T.alloc_fragment((HEADS, TILE), "bfloat16")
            p_1 = T.alloc_fragment((HEADS, TILE), "bfloat16")
            top_0 = T.alloc_fragment((HEADS,), "float32")
            top_1 = T.alloc_fragment((HEADS,), "float32")
            factor_0 = T.alloc_fragment((HEADS,), "float32")
            factor_1 = T.alloc_fragment((HEADS,), "float32")
            total_0 = T.alloc_fragment((HEADS,), "float32")
            total_1 = T.alloc_fragment((HEADS,), "float32")
            row_0 = T.alloc_fragment((HEADS,), "float32")
            row_1 = T.alloc_fragment((HEADS,), "float32")
            grown_0 = T.alloc_local((1,), "int32")
            grown_1 = T.alloc_local((1,), "int32")
            token = T.alloc_local((rows,), "int32")
            q_ready = T.alloc_barrier(arrive_count=128)
            ready = T.alloc_barrier(arrive_count=[128, 128])
            free = T.alloc_barrier(arrive_count=[256, 256])
            part_ready = T.alloc_barrier(arrive_count=[128, 128])
            part_free = T.alloc_barrier(arrive_count=[128, 128])

            thread = T.get_thread_binding()
            first_head = head_block * HEADS
            used = plan[query, 0]
            count = plan[query, 1]
            start = plan[query, 2]
            unfinished = plan[query, 3]
            tiles = T.ceildiv(count, TILE)

            if thread >= 256:
                T.set_max_nreg(producer_registers, 0)
                lane = thread - 256
                T.tma_copy(q[query, first_head : first_head + HEADS, :], Q_shared, barrier=q_ready)
                T.barrier_arrive(q_ready)
                for t in T.serial(tiles):
                    # The ids are read before the wait, which then hides their latency.
                    for r in T.unroll(rows):
                        group = t * groups + (r * 16 + lane // 8) // size
                        token[r] = (
                            T.if_then_else(
                                group < used,
                                start + pools[query, T.min(group, slots - 1)] * size,
                                unfinished,
                            )
                            + (r * 16 + lane // 8) % size
                        )
                    T.barrier_wait(free[t % 2], ((t // 2) & 1) ^ 1)
                    for r in T.unroll(rows):
                        for u in T.unroll(width // 64):
                            # Without the predicate's truth nothing is read and zeros are written.
                            T.ptx_cp_async(
                                T.access_ptr(
                                    K_shared[t % 2, r * 16 + lane // 8, u * 64 + lane % 8 * 8],
                                    "w",
                                    8,
                                ),
                                T.access_ptr(latent[token[r], u * 64 + lane % 8 * 8], "r", 8),
                                8,
                                predicate=t * TILE + r * 16 + lane // 8 < count,
                            )
                    T.cp_async_barrier_noinc(ready[t % 2])
            elif thread < 128:
                T.barrier_wait(q_ready, 0)
                attend(
                    0, Q_shared, K_shared, part, ready, free, part_ready, part_free, count, tiles,
                    query, first_head, acc_o_0, acc_s_0, p_0, top_0, factor_0, total_0, row_0,
                    grown_0, out, lse,
                )  # fmt: skip
            else:
                T.barrier_wait(q_ready, 0)
                attend(
                    1, Q_shared, K_shared, part, ready, free, part_ready, part_free, count, tiles,
                    query, first_head, acc_o_1, acc_s_1, p_1, top_1, factor_1, total_1, row_1,
                    grown_1, out, lse,
                )  # fmt: skip

    return sparse_mla_forward_split
