"""On two GPUs: planned experts compute what plain expert parallelism does, and wait for nothing.

All in one pair of processes, because most of the time goes into starting them.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.swaps import replaced
from tests.training import free_port, set_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

LATE = 20_000_000
"""Cycles, about 10 ms."""


def test_two_gpus_compute_what_plain_expert_parallelism_computes() -> None:
    multiprocessing.spawn(rank_of_two, (2, free_port()), nprocs=2)


def rank_of_two(rank: int, world_size: int, port: int) -> None:
    from components.titan.device import use_device

    use_device("auto")
    set_rank(rank, world_size, port)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.cuda.set_device(rank)
    torch.autograd.set_multithreading_enabled(False)  # as in a run
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        check_rows()
        check_gradients()
        check_ways()
        check_reads()
    finally:
        dist.destroy_process_group()


def check_rows() -> None:
    """Triton's rows are plain torch's."""
    from kernels.expert_rows import naive, triton_

    for dtype in (torch.bfloat16, torch.float32):
        rows, other, back = (torch.randn(60, 3000, device="cuda").to(dtype) for _ in range(3))
        index, place = torch.randperm(60, device="cuda"), torch.randperm(60, device="cuda")
        place, weights = place.view(20, 3), torch.rand(60, device="cuda")
        for name, given in (
            ("gather", (rows[::2], index[:30] // 2, torch.zeros_like(rows[:30]))),
            ("scatter", (rows, index, torch.zeros(120, 3000, device="cuda").to(dtype)[::2])),
            ("weigh_", (rows, weights)),
            ("swiglu", (rows, other, torch.inf, torch.zeros_like(rows))),
            ("swiglu_gradients_", (rows, other, back, weights, 0.5, torch.zeros_like(weights))),
        ):
            compare_kernels(getattr(naive, name), getattr(triton_, name), given)
        for weighed in (None, weights.view(20, 3)):
            for rounded in (False, True):
                out = torch.zeros(40, 3000, device="cuda").to(dtype)[::2]
                sums = (partial(way.sum_places, rounded=rounded) for way in (naive, triton_))
                compare_kernels(*sums, (rows, place, weighed, out))


def compare_kernels(plain: Any, fast: Any, given: tuple) -> None:
    copies = [[g.clone() if torch.is_tensor(g) else g for g in given] for _ in range(2)]
    plain(*copies[0])
    fast(*copies[1])
    for a, b in zip(*copies, strict=True):
        if torch.is_tensor(a):
            tight = a.dtype != torch.bfloat16
            torch.testing.assert_close(a, b, rtol=1e-4 if tight else 2e-2, atol=1e-3)


@cache
def both() -> DeviceMesh:
    return init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))


def layer(family: str, **form: Any) -> Any:
    """This rank's share of a small layer's experts; without a form, as torchtitan runs them."""
    from torchtitan.distributed.spmd_types import set_spmd_meshes

    from components.expert_dispatch.balanced_experts import balanced_experts
    from components.titan.dispatch import gloo
    from tests.unit.experts_support import EXPERTS, build, config_of

    config = config_of(family)
    config.token_dispatcher = gloo(config.token_dispatcher)
    if form:
        settings = {"capacity_factor": 1.0, "minimum_rows": 1, "threshold": 1.0} | form
        config = balanced_experts(config, **settings)
    experts, each = build(config, torch.bfloat16), EXPERTS // 2
    mesh = both()
    for parameter in experts.parameters():
        parameter.data = parameter.data[dist.get_rank() * each :][:each].clone().cuda()
    set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
    experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return experts


def gradients(experts: Any, *given: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and every gradient."""
    from tests.unit import experts_support as support

    x, weights, ids = given
    experts.zero_grad(set_to_none=True)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = support.run(experts, x, weights, ids)
    out.backward(support.rows(len(x), 7, x.dtype).cuda())
    named = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **named}


def draw(tokens: int, **settings: Any) -> tuple[torch.Tensor, ...]:
    from tests.unit.experts_support import routing, rows

    one = settings.pop("one_expert", False)
    weights, ids = routing(tokens, dist.get_rank(), **settings)
    ids = torch.full_like(ids, 3) if one else ids
    return rows(tokens, dist.get_rank(), torch.bfloat16).cuda(), weights.cuda(), ids.cuda()


CASES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((301, 57), {}),
    ((301, 57), {"experts": 4}),
    ((200, 0), {"one_expert": True}),
    ((3, 90), {"duplicates": True, "experts": 3}),
    ((0, 0), {}),
]
"""Tokens of each rank, and how they are routed."""


def check_gradients() -> None:
    rank = dist.get_rank()
    for family in ("glm", "moe"):
        for lengths, settings in CASES:
            given = draw(lengths[rank], **settings)
            expected = gradients(layer(family), *given)
            for chunks in (1, 2, 3):
                experts = layer(family, chunk_tokens=1, max_chunks=chunks)
                found = gradients(experts, *given)
                assert experts.latest.chunks == (chunks if max(lengths) else 1)
                for name, value in expected.items():
                    error = (found[name].float() - value.float()).norm()
                    limit = 2e-2 * value.float().norm() + 1e-12
                    assert error <= limit, (family, lengths, settings, chunks, name, error, limit)


def check_ways() -> None:
    """Beside the computation as in line, to the bit, with one rank late, memory spoilt once it is
    let go of, and no wait of the host after it has read the counts."""
    from components.expert_dispatch import balanced, balanced_experts, layer_pass, travel

    given = draw((4001, 1203)[dist.get_rank()], experts=5)
    experts = layer("glm", chunk_tokens=1, max_chunks=4)
    expected = in_a_way(experts, given, beside=False)
    send = layer_pass.LayerPass.send

    def late(*args: Any) -> Any:
        if dist.get_rank():
            torch.cuda._sleep(LATE)
        return send(*args)

    def without_waiting(*args: Any, kept_chunks: int) -> torch.Tensor:
        with no_waits():
            return balanced.run_balanced(*args[:-1], kept_chunks)

    for kept_chunks in (0, 1, 4):
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(replaced(travel, "let_go", lambda memory: memory.fill_(torch.nan)))
            enter(replaced(layer_pass.LayerPass, "send", late))
            run_balanced = partial(without_waiting, kept_chunks=kept_chunks)
            enter(replaced(balanced_experts, "run_balanced", run_balanced))
            found = in_a_way(experts, given, beside=True)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (kept_chunks, name)
    x, weights, ids = given
    out = layer_output(experts, x.requires_grad_(), weights.requires_grad_(), ids)
    with no_waits():
        out.backward(torch.ones_like(out))


def check_reads() -> None:
    """Once ranks have compared their settings, the host waits once per layer, for the counts."""
    given = draw((4001, 1203)[dist.get_rank()], experts=5)
    for chunks in (1, 4):
        experts = layer("glm", chunk_tokens=1, max_chunks=chunks)
        gradients(experts, *given)
        x, weights, ids = given
        counts = torch.bincount(ids.flatten(), minlength=experts.token_dispatcher.num_experts)
        with warnings.catch_warnings(record=True) as found, mode_of_waits("warn"):
            warnings.simplefilter("always")
            experts(x[None], weights[None], ids[None], counts)
        waits = [w for w in found if "synchronizing CUDA operation" in str(w.message)]
        assert len(waits) == 1, [str(w.message) for w in found]
        assert experts.latest.chunks == chunks


def layer_output(experts: Any, *given: torch.Tensor) -> torch.Tensor:
    from tests.unit.experts_support import run

    return run(experts, *given)


def in_a_way(experts: Any, given: tuple, *, beside: bool) -> dict[str, torch.Tensor]:
    from components.expert_dispatch import balanced_experts
    from components.expert_dispatch.layer_pass import Surroundings

    with replaced(balanced_experts, "Surroundings", partial(Surroundings, beside=beside)):
        return gradients(experts, *given)


@contextmanager
def mode_of_waits(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


no_waits = partial(mode_of_waits, "error")
