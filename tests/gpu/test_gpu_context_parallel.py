"""On two GPUs: mixers whose sequence is split over ranks compute what one rank computes.

All in one pair of processes, because most of the time goes into starting them, and into kernels
that are tuned and compiled for few shapes.
"""

import os
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.benchmarks.harness import relative_error
from tests.training import free_port, set_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

LATE = 20_000_000
"""Cycles, about 10 ms."""

OUTPUT, GRADIENTS = 2e-2, 5e-2
"""``|out - ref| / |ref|`` between two runs in bfloat16, each of which rounds between projections
and inside kernels."""

OTHER_POOLS = 2e-2
"""Share of chosen pools that roundings may exchange for others of almost the same score."""

BATCHES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "documents over every cut": ((700, 3, 833), None),
    "all tokens of a rank masked": ((700, 3, 833), 1),
    "one document": ((1536,), None),
    "shorter than a share": ((5, 1200, 3, 64), None),
    "cut between documents": ((256,) * 4, None),
    "no pool on one rank": ((1,) * 50 + (46,), None),
}
"""Lengths for two ranks, and a rank at whose outputs nothing pulls."""


def test_two_gpus_compute_what_one_computes() -> None:
    multiprocessing.spawn(rank_of_two, (2, free_port()), nprocs=2)


def rank_of_two(rank: int, world_size: int, port: int) -> None:
    from components.titan.device import use_device

    use_device("auto")
    set_rank(rank, world_size, port)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.cuda.set_device(rank)
    torch.autograd.set_multithreading_enabled(False)  # as in a run
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    try:
        for mixer in ("kda", "dsa", "softmax"):
            check_mixer(mixer)
    finally:
        dist.destroy_process_group()


def shape() -> Any:
    """Narrow layers with the published heads: kernels are tuned for them, or take no others."""
    from tests.benchmarks.context_shapes import SIZES

    published = SIZES["32k"]
    glm = published.glm | {"dim": 512, "q_lora_rank": 256, "index_topk": 512}
    moe = published.moe | {"dim": 512, "n_heads": 8, "n_kv_heads": 2, "max_seq_len": 2048}
    return replace(published, glm=glm, moe=moe)


def check_mixer(mixer: str, device: str = "cuda") -> None:
    """Outputs and every gradient of all methods and layouts, one rank late; bytes by formula."""
    from components.context_parallel.layout import KINDS
    from tests.benchmarks.context_variants import Bench, variants_of

    whole, *split = variants_of(mixer)
    for kind in KINDS:
        bench = Bench(shape(), mixer, kind, device, seed=0)
        for batch, (lengths, masked) in BATCHES.items():
            bench.take(lengths, masked)
            if mixer == "dsa":
                assert bench.other_pools() <= OTHER_POOLS, (kind, batch)
            wanted = bench.result(whole)
            for late, variant in product((0, 1), split):
                bench.link.traffic.reset()
                if dist.get_rank() == late:
                    torch.cuda._sleep(LATE)
                found = bench.result(variant)
                check_close(found, wanted, f"{mixer} {variant.name}, {kind}, {batch}")
                if batch == "one document":
                    check_bytes(bench, variant)
            if mixer == "dsa":
                bench.choose_freely()


def check_close(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, reference in wanted.items():
        error = relative_error(found[name], reference)
        limit = OUTPUT if name == "out" else GRADIENTS
        assert error <= limit, f"{what}, {name}: {error:.1e}"


def check_bytes(bench: Any, variant: Any) -> None:
    sent = {key: n for key, n in bench.link.traffic.sent.items() if key[0] != "kda.halo"}
    counted = [
        sum(n for (_, d), n in sent.items() if d == direction)
        for direction in ("forward", "backward")
    ]
    assert counted == list(bench.volume(variant)), variant.name
