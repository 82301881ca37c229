# mypy: ignore-errors
"""The backward kernel with three warpgroups: one query and 64 heads per block.

Of every tile of 64 keys the first warpgroup computes the logits and probabilities P, the second
their gradient dS; a third gathers keys. Then both take half of the columns each of dQ += dS K and
of dK = dS^T Q + P^T dO, and add dK to the float32 gradient row by row. Keys are needed up to dQ
only, so the next tile is gathered during the products of dK, into the same buffer. Shared memory:
queries, output gradients and keys 64 KiB each, P and dS 8 KiB each in bfloat16, P 16 KiB more in
float32.

A block walks through the tiles of its query from the first to the last. ``running`` and ``partial``
change that; ``kernels.sparse_mla.walk`` says what for.
"""

import tilelang.language as T

from kernels.sparse_mla.additions import additions
from kernels.sparse_mla.cuda_source import ADDITIONS, IN_PHASE
from kernels.sparse_mla.shape import HEADS, LOG2E, TILE, Shape


def build(
    shape: Shape,
    *,
    emit: bool,
    scatter: str,
    consumer_registers: int,
    producer_registers: int,
    running: int = 0,
    partial: bool = False,
):
    """The TileLang function; arguments as ``kernels.sparse_mla.tilelang_backward`` calls it.

    Args:
        shape: ``tail`` must be 0.
        emit: also write the probabilities of the pools.
        scatter: how dK leaves the block: ``lines``, ``quads`` and ``pairs`` add 128, 64 or 32
            neighbouring bytes of a row at a time to ``dlatent`` (T, width), as
            ``kernels.sparse_mla.additions`` says; ``store`` writes to ``dlatent`` (head blocks * Q
            * slots, width) where no two blocks meet.
        consumer_registers, producer_registers: per thread of the two warpgroups that compute and
            of the one that loads; 504 together, counting the first twice, is what a block has.
        running: blocks that the GPU runs at a time. They walk in phase: a block begins where the
            others are on average, by ``clock``, and wraps around. 0: it begins at its first tile.
        partial: walk only through the tiles from ``walk[query, 0]`` to before ``walk[query, 1]``
            and add to ``dq``, which is float32. Otherwise ``walk`` is not read.
    """
    width, size, scale = shape.width, shape.size, shape.scale
    heads, half, cols = shape.heads, shape.width // 2, shape.width // 4
    groups, rows, steps = TILE // shape.size, TILE // 16, shape.scale * LOG2E
    reach = [2**bit for bit in range(size.bit_length())]
    queries, tokens, slots = T.dynamic("queries, tokens, slots")
    targets = T.dynamic("targets")
    blocks = heads // HEADS
    lines, adds = scatter == "lines", additions(width, scatter)

    @T.macro
    def products(
        side, n, t, count, Q_shared, G_shared, K_shared, P_shared, S_shared, target, ds_ready,
        k_free, p_free, acc_q, acc_k, row, other, held, dlatent,
    ):  # fmt: skip
        first = side * half
        second = side * half + cols
        # The first warpgroup fills its wait for dS; the second has just written it and lets go of
        # the keys first.
        if side == 0:
            T.wgmma_gemm(
                P_shared, G_shared[:, first : first + cols], acc_k, transpose_A=True,
                clear_accum=True,
            )  # fmt: skip
        T.barrier_wait(ds_ready, n & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(S_shared, K_shared[:, first : first + half], acc_q)
        if side == 1:
            T.wgmma_gemm(
                P_shared, G_shared[:, first : first + cols], acc_k, transpose_A=True,
                clear_accum=True,
            )  # fmt: skip
        T.wgmma_gemm(S_shared, Q_shared[:, first : first + cols], acc_k, transpose_A=True)
        T.wait_wgmma(1 + side)
        T.barrier_arrive(k_free)
        T.wait_wgmma(0)
        adds.rows(n, target, row, other)
        adds.add((t + 1) * TILE <= count, acc_k, row, other, held, first, dlatent)
        T.wgmma_gemm(
            P_shared, G_shared[:, second : second + cols], acc_k, transpose_A=True, clear_accum=True
        )
        T.wgmma_gemm(S_shared, Q_shared[:, second : second + cols], acc_k, transpose_A=True)
        T.wait_wgmma(0)
        T.barrier_arrive(p_free)
        adds.add((t + 1) * TILE <= count, acc_k, row, other, held, second, dlatent)

    def tile_at(n, begin, first, length):
        """The n-th tile of a block that walks from ``first`` to the end, then from the start."""
        return begin + first + T.if_then_else(first + n < length, n, n - length)

    @T.macro
    def write(side, acc_q, Q_shared, row, held, done, dq, query, first_head):
        first = side * half
        if partial:
            for i in T.Parallel(HEADS):
                row[i] = query * heads + first_head + i
            adds.add_quads("true", acc_q, row, held, first, dq)
        else:
            # Queries lie where dQ goes: both warpgroups must have read them.
            T.barrier_arrive(done)
            T.barrier_wait(done, 0)
            T.copy(acc_q, Q_shared[:, first : first + half])
            T.copy(
                Q_shared[:, first : first + half],
                dq[query, first_head : first_head + HEADS, first : first + half],
            )

    @T.prim_func
    def sparse_mla_backward_split(
        q: T.Tensor((queries, heads, width), "bfloat16"),
        grad: T.Tensor((queries, heads, width), "bfloat16"),
        latent: T.Tensor((tokens, width), "bfloat16"),
        pools: T.Tensor((queries, slots), "int32"),
        plan: T.Tensor((queries, 4), "int32"),
        lse: T.Tensor((queries, heads), "float32"),
        delta: T.Tensor((queries, heads), "float32"),
        dq: T.Tensor((queries, heads, width), "float32" if partial else "bfloat16"),
        dlatent: T.Tensor((targets, width), "float32"),
        mass: T.Tensor(T.dynamic("mass_blocks, mass_queries, mass_slots"), "float32"),
        walk: T.Tensor((T.dynamic("walk_queries"), 2), "int32"),
        clock: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(queries * blocks, threads=384) as block:
            # Blocks that gather the same keys are neighbours.
            query = block // blocks
            head_block = block % blocks
            T.import_source(ADDITIONS + IN_PHASE)
            Q_shared = T.alloc_shared((HEADS, width), "bfloat16")
            G_shared = T.alloc_shared((HEADS, width), "bfloat16")
            K_shared = T.alloc_shared((TILE, width), "bfloat16")
            P_shared = T.alloc_shared((HEADS, TILE), "bfloat16")
            S_shared = T.alloc_shared((HEADS, TILE), "bfloat16")
            exact_p = T.alloc_shared((TILE // 4, 128, 2), "float32")
            target = T.alloc_shared((2, TILE), "int32")
            acc_q_0 = T.alloc_fragment((HEADS, half), "float32")
            acc_q_1 = T.alloc_fragment((HEADS, half), "float32")
            acc_k_0 = T.alloc_fragment((TILE, cols), "float32")
            acc_k_1 = T.alloc_fragment((TILE, cols), "float32")
            acc_p = T.alloc_fragment((HEADS, TILE), "float32")
            acc_s = T.alloc_fragment((HEADS, TILE), "float32")
            shift = T.alloc_fragment((HEADS,), "float32")
            inner = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_local((1,), "float32")
            row_0 = T.alloc_fragment((TILE,), "int32")
            other_0 = T.alloc_fragment((TILE,), "int32") if lines else row_0
            row_1 = T.alloc_fragment((TILE,), "int32")
            other_1 = T.alloc_fragment((TILE,), "int32") if lines else row_1
            held_0 = T.alloc_local((adds.held_size,), "float32")
            held_1 = T.alloc_local((adds.held_size,), "float32")
            token = T.alloc_local((rows,), "int32")
            place = T.alloc_local((1,), "int32")
            first_shared = T.alloc_shared((1,), "int32")
            first_ready = T.alloc_barrier(arrive_count=128)
            q_ready = T.alloc_barrier(arrive_count=128)
            k_ready = T.alloc_barrier(arrive_count=256)
            k_free = T.alloc_barrier(arrive_count=256)
            p_ready = T.alloc_barrier(arrive_count=128)
            ds_ready = T.alloc_barrier(arrive_count=128)
            p_free = T.alloc_barrier(arrive_count=384 if emit else 256)
            done = T.alloc_barrier(arrive_count=256)

            thread = T.get_thread_binding()
            first_head = head_block * HEADS
            used = plan[query, 0]
            count = plan[query, 1]
            start = plan[query, 2]
            unfinished = plan[query, 3]
            tiles = T.ceildiv(count, TILE)
            begin = walk[query, 0] if partial else 0
            length = walk[query, 1] - begin if partial else tiles
            per_query = T.ceildiv(slots * size + size - 1, TILE) * TILE
            first_row = (head_block * queries + query) * per_query

            if partial and length <= 0:
                T.thread_return()
            if thread >= 256:
                T.set_max_nreg(producer_registers, 0)
                lane = thread - 256
                T.tma_copy(q[query, first_head : first_head + HEADS, :], Q_shared, barrier=q_ready)
                T.tma_copy(
                    grad[query, first_head : first_head + HEADS, :], G_shared, barrier=q_ready
                )
                T.barrier_arrive(q_ready)
                if running:
                    if lane == 0:
                        first_shared[0] = T.call_extern(
                            "int32", "first_tile", T.address_of(clock[0]), length, running
                        )
                    T.barrier_arrive(first_ready)
                    T.barrier_wait(first_ready, 0)
                first = first_shared[0] if running else 0
                for n in T.serial(length):
                    if running:
                        place[0] = tile_at(n, begin, first, length)
                    t = place[0] if running else begin + n
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
                    T.barrier_wait(k_free, (n & 1) ^ 1)
                    if lane % 8 == 0:
                        for r in T.unroll(rows):
                            target[n % 2, r * 16 + lane // 8] = T.if_then_else(
                                t * TILE + r * 16 + lane // 8 < count,
                                token[r]
                                if scatter != "store"
                                else first_row + t * TILE + r * 16 + lane // 8,
                                -1,
                            )
                    for r in T.unroll(rows):
                        for u in T.unroll(width // 64):
                            # Without the predicate's truth nothing is read and zeros are written.
                            T.ptx_cp_async(
                                T.access_ptr(
                                    K_shared[r * 16 + lane // 8, u * 64 + lane % 8 * 8], "w", 8
                                ),
                                T.access_ptr(latent[token[r], u * 64 + lane % 8 * 8], "r", 8),
                                8,
                                predicate=t * TILE + r * 16 + lane // 8 < count,
                            )
                    T.cp_async_barrier_noinc(k_ready)
                    # The copies' arrival does not order the plain stores before it.
                    T.barrier_arrive(k_ready)
                    if running and lane == 0:
                        T.call_extern("handle", "tick", T.address_of(clock[0]), length)
                    if emit:
                        # 2 * size threads add up a pool: a token each two, 32 heads each. They
                        # start at different heads for the sake of shared memory's banks.
                        T.barrier_wait(p_ready, n & 1)
                        key = lane // 2
                        total[0] = 0.0
                        for w in T.unroll(4):
                            for r in T.unroll(8):
                                total[0] += exact_p[
                                    key // 8 * 2 + lane % 2,
                                    w * 32 + (r + key // 8 * 2 + lane % 2) % 8 * 4 + key % 8 // 2,
                                    key % 2,
                                ]
                        T.barrier_arrive(p_free)
                        for shift_of in reach:
                            total[0] += T.shfl_xor(total[0], shift_of)
                        pool = t * groups + lane // (2 * size)
                        if lane % (2 * size) == 0 and pool < used:
                            mass[head_block, query, pool] = total[0]
            elif thread < 128:
                T.set_max_nreg(consumer_registers, 1)
                T.copy(lse[query, first_head : first_head + HEADS], shift)
                for i in T.Parallel(HEADS):
                    shift[i] = shift[i] * LOG2E
                T.fill(acc_q_0, 0)
                T.barrier_wait(q_ready, 0)
                if running:
                    T.barrier_wait(first_ready, 0)
                first = first_shared[0] if running else 0
                for n in T.serial(length):
                    if running:
                        place[0] = tile_at(n, begin, first, length)
                    t = place[0] if running else begin + n
                    T.barrier_wait(k_ready, n & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(Q_shared, K_shared, acc_p, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(HEADS, TILE):
                        acc_p[i, j] = T.exp2(acc_p[i, j] * steps - shift[i])
                    if t == tiles - 1:
                        for i, j in T.Parallel(HEADS, TILE):
                            acc_p[i, j] = T.if_then_else(t * TILE + j < count, acc_p[i, j], 0)
                    T.barrier_wait(p_free, (n & 1) ^ 1)
                    # Both warpgroups hold (heads, keys) alike: a thread writes for the thread of
                    # the same number, and neighbouring threads touch neighbouring words.
                    for i, j in T.Parallel(HEADS, TILE):
                        exact_p[
                            j // 8 * 2 + i % 16 // 8, i // 16 * 32 + i % 8 * 4 + j % 8 // 2, j % 2
                        ] = acc_p[i, j]
                    T.copy(acc_p, P_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                    T.barrier_wait(p_ready, n & 1)
                    products(
                        0, n, t, count, Q_shared, G_shared, K_shared, P_shared, S_shared, target,
                        ds_ready, k_free, p_free, acc_q_0, acc_k_0, row_0, other_0, held_0,
                        dlatent,
                    )  # fmt: skip
                write(0, acc_q_0, Q_shared, row_0, held_0, done, dq, query, first_head)
            else:
                T.set_max_nreg(consumer_registers, 1)
                T.copy(delta[query, first_head : first_head + HEADS], inner)
                T.fill(acc_q_1, 0)
                T.barrier_wait(q_ready, 0)
                if running:
                    T.barrier_wait(first_ready, 0)
                first = first_shared[0] if running else 0
                for n in T.serial(length):
                    if running:
                        place[0] = tile_at(n, begin, first, length)
                    t = place[0] if running else begin + n
                    T.barrier_wait(k_ready, n & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(G_shared, K_shared, acc_s, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(p_ready, n & 1)
                    for i, j in T.Parallel(HEADS, TILE):
                        acc_s[i, j] = (
                            (acc_s[i, j] - inner[i])
                            * scale
                            * exact_p[
                                j // 8 * 2 + i % 16 // 8,
                                i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
                                j % 2,
                            ]
                        )
                    T.copy(acc_s, S_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_ready)
                    products(
                        1, n, t, count, Q_shared, G_shared, K_shared, P_shared, S_shared, target,
                        ds_ready, k_free, p_free, acc_q_1, acc_k_1, row_1, other_1, held_1,
                        dlatent,
                    )  # fmt: skip
                write(1, acc_q_1, Q_shared, row_1, held_1, done, dq, query, first_head)

    return sparse_mla_backward_split
