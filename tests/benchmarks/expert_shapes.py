"""What the benchmark of expert dispatch runs: shapes, routing, and what can be said beforehand.

Everything here is arithmetic on the host. All ranks route alike, so every rank knows what all do.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from components.expert_dispatch.layer_plan import LayerPlan, PlanRule
from components.expert_dispatch.partition import ChunkRule
from components.expert_dispatch.profiles import RoutingProfile
from tests.benchmarks.machine import Machine
from tests.send_tables import send_table

PAPER_EXPERTS = 128
"""Of a layer in arXiv 2609.14306, whose profiles are named after so many."""

LINK_GBPS = 450.0
"""NVLink of an H200 in one direction."""

DENSE_TFLOPS = 989.0
"""bfloat16 products of an H200, without sparsity."""

_BYTES = 2
"""Of a bfloat16 value: tokens, weights and gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One layer of experts, as a rank sees it."""

    tokens: int
    """Of one rank, N."""

    dim: int
    """Hidden width, H; a multiple of 8."""

    hidden: int
    """Width of an expert, I; a multiple of 8."""

    top_k: int

    experts: int
    """That live on one rank."""

    chunk_tokens: int
    """Tokens of one rank per chunk."""

    gate_tokens: int
    """Of one rank, where results are compared; cut into as many chunks."""

    minimum_rows: int
    """See ``PlanRule``."""

    @property
    def chunks(self) -> int:
        """K."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def routes(self) -> int:
        """Of one rank; as many rows as it computes when all compute as many."""
        return self.tokens * self.top_k

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert."""
        return 3 * self.dim * self.hidden * _BYTES

    def gate(self) -> "Shape":
        """The same layer with fewer tokens."""
        chunk = -(-self.gate_tokens // self.chunks)
        return Shape(**(asdict(self) | {"tokens": self.gate_tokens, "chunk_tokens": chunk}))


SIZES = {
    # Section 4 of the paper: 128 experts on 8 ranks; here as many per rank, and tokens, on any.
    "32k": Shape(
        tokens=32_768, dim=4096, hidden=4096, top_k=4, experts=16, chunk_tokens=10_923,
        gate_tokens=2048, minimum_rows=1024,
    ),
    "65k": Shape(
        tokens=65_536, dim=7168, hidden=2048, top_k=8, experts=16, chunk_tokens=6554,
        gate_tokens=2048, minimum_rows=1024,
    ),
    "tiny": Shape(
        tokens=48, dim=32, hidden=16, top_k=4, experts=4, chunk_tokens=16, gate_tokens=48,
        minimum_rows=1,
    ),
}  # fmt: skip


def profile_for(text: str, experts: int) -> RoutingProfile:
    """A profile of the paper's 128 experts, with the same share of another number of them hot.

    80/16 of 128 becomes 80/4 of 32: one eighth either way. At least one stays hot. All hot experts
    live on the first rank, as they do in the paper. Where fewer are hot than a token has routes,
    it visits some more than once: with top-8, 80/4 of 32 has what only 50/4 has there.

    Raises:
        ValueError: no profile, or one with more than 128 hot experts.
    """
    profile = RoutingProfile.parse(text)
    problem = profile.problem(PAPER_EXPERTS)
    if problem:
        raise ValueError(f"--profiles {text}: {problem}")
    if not profile.hot:
        return profile
    return RoutingProfile(profile.percent, max(1, profile.hot * experts // PAPER_EXPERTS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one way to cut and place a layer's rows makes of a profile; all ranks together."""

    chunks: int

    before: float
    """Rows of the fullest rank over the mean, every expert computed where it lives."""

    after: float
    """The same as they are computed."""

    receive_peak: int
    """Rows that a rank receives in one chunk, itself included, at most."""

    rank_rows: int
    """Rows that the fullest rank computes in all chunks."""

    wire_rows: int
    """Rows that cross the busiest rank's link in its busier direction on their way out."""

    migrated: int
    """Experts whose weights are copied to another rank."""


def traffic(
    shape: Shape, ranks: int, profile: RoutingProfile, *, planned: bool, chunks: int
) -> Traffic:
    """See ``Traffic``.

    Args:
        planned: by the planner, at capacity factor 1; else every expert stays where it lives.
    """
    experts = shape.experts * ranks
    ids = profile.expert_ids(shape.tokens, shape.top_k, experts, "cpu")
    rule = ChunkRule(chunk_tokens=-(-shape.tokens // chunks), max_chunks=chunks)
    partition = rule.cut(shape.tokens)
    layer = LayerPlan(
        rank=0,
        counts=send_table(partition, ids, experts).expand(ranks, -1, -1).contiguous(),
        partition=partition,
        # Nobody is fuller than ``ranks`` times the mean.
        rule=PlanRule(minimum_rows=shape.minimum_rows, threshold=1.0 if planned else ranks + 1.0),
    )
    splits = [chunk.splits for chunk in layer.chunks]
    apart = sum(splits) * (1 - torch.eye(ranks, dtype=torch.int64))
    load = layer.load(row_bytes=shape.dim * _BYTES, expert_bytes=shape.expert_bytes)
    return Traffic(
        chunks=len(splits),
        before=load.before,
        after=load.after,
        receive_peak=max(int(each.sum(0).max()) for each in splits),
        rank_rows=int(sum(splits).sum(0).max()),
        wire_rows=max(int(apart.sum(0).max()), int(apart.sum(1).max())),
        migrated=len(layer.plan.transfers),
    )


def resident_bytes(shape: Shape) -> int:
    """What forward and backward take and return: weights, tokens, outputs, gradients of each."""
    tokens = shape.tokens * shape.dim * _BYTES
    return 2 * shape.experts * shape.expert_bytes + 4 * tokens


def estimated_peak(shape: Shape, moved: Traffic, *, whole: bool, rounded: bool) -> int:
    """Bytes of the fullest rank in forward and backward; meant to err on the high side.

    Plain autograd holds, per row that a rank computes, its input, four values of width I and, in
    backward, the gradients of two of these; up to four more copies of width H are on their way to
    or from the wire. At home there are the returned rows, and twice as much for their gradients.

    Args:
        moved: under what is estimated.
        whole: rows of all chunks are there at once, as under plain autograd.
        rounded: torchtitan's own sum over experts. On CUDA it adds up in a fixed order by sorting
            the int64 coordinates of every element, about nine copies of them, beside three
            of the rows in float32.
    """
    rows, chunks = (moved.rank_rows, 1) if whole else (moved.receive_peak, moved.chunks)
    routes = -(-shape.routes // chunks)
    computed = rows * _BYTES * (5 * shape.dim + 6 * shape.hidden)
    at_home = routes * shape.dim * (3 * _BYTES + (9 * 8 + 3 * 4 if rounded else 0))
    foreign = 2 * moved.migrated * shape.expert_bytes
    return computed + at_home + foreign + resident_bytes(shape)


def floors(shape: Shape, moved: Traffic, machine: Machine) -> dict[str, Any]:
    """Least milliseconds of a rank: its share of the products, and rows that must leave it.

    Args:
        moved: of the plan, with which every rank has as many rows.

    Returns:
        ``forward_ms``, ``both_ms`` (forward and backward) and the arithmetic.
    """
    rates = machine.ceilings.matmul_tflops
    dtype = "bfloat16" if "bfloat16" in rates else "float32"
    flops = 6.0 * shape.routes * shape.dim * shape.hidden
    nbytes = 2.0 * moved.wire_rows * shape.dim * _BYTES
    product_ms, wire_ms = flops / rates[dtype] / 1e9, nbytes / LINK_GBPS / 1e6
    return {
        "forward_ms": max(product_ms, wire_ms),
        # Two products for each one, and both exchanges the other way.
        "both_ms": max(3 * product_ms, 2 * wire_ms),
        "arithmetic": (
            f"6 N k H I = {flops / 1e12:.4g} TFLOP forward, three times as many with backward: "
            f"{product_ms:.4g} and {3 * product_ms:.4g} ms at the measured {rates[dtype]:.4g} "
            f"TFLOP/s ({dtype}), {flops / DENSE_TFLOPS / 1e9:.4g} and "
            f"{3 * flops / DENSE_TFLOPS / 1e9:.4g} ms at {DENSE_TFLOPS:.4g}; under the plan "
            f"{moved.wire_rows} rows of {shape.dim * _BYTES} bytes leave a rank and come back = "
            f"{nbytes / 1e9:.4g} GB: {wire_ms:.4g} and {2 * wire_ms:.4g} ms at {LINK_GBPS:.4g} GB/s"
        ),
    }
