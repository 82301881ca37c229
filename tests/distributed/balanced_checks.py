"""What planned experts keep, ask and refuse; every rank of a process group calls these."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

import components.expert_dispatch.balanced_experts as module
from components.expert_dispatch.partition import DisagreementError
from components.expert_dispatch.travel import Outward
from components.expert_dispatch.weights import Fetch, Migration
from tests.distributed.balanced_support import (
    CHUNK,
    FIRST_HALF,
    Watched,
    assert_close,
    on_ranks,
    planned,
)
from tests.swaps import counted, kept, replaced
from tests.unit.experts_support import DIM, TOP_K, gradients, routing, rows, run


def check_frozen() -> None:
    """What is frozen gets no gradient, and changes none; nor are its copies' sent."""
    rank = dist.get_rank()
    x, (weights, ids) = rows(19, rank), FIRST_HALF(19, rank)
    _, wanted = gradients(on_ranks("glm"), x, weights, ids)
    for frozen in ("w1_EFD", "w1_EFD w2_EDF w3_EFD", "x", "weights"):
        experts = planned("glm", chunk_tokens=CHUNK, max_chunks=64)
        for name, parameter in experts.inner_experts.named_parameters():
            parameter.requires_grad_(name not in frozen)
        leaf = x.clone().requires_grad_(frozen != "x")
        scores = weights.clone().requires_grad_(frozen != "weights")
        fetches: list[Fetch] = []
        with kept(Migration, "fetch", fetches):
            run(experts, leaf, scores, ids).backward(rows(19, 7))
        # Also by those that only lend: nobody reads weights that are freed after the pass.
        assert len(fetches) == 2 and not any(fetch._works for fetch in fetches)
        found = {"x": leaf.grad, "weights": scores.grad}
        found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
        for name, gradient in found.items():
            if name.rpartition(".")[2] in frozen.split():
                assert gradient is None, name
            else:
                assert_close(gradient, wanted[name], 1e-12, f"{name} beside {frozen}")


def check_memory() -> None:
    """Tokens, weights and ids are all that is kept; no graph outlives its chunk."""
    n = (20, 31, 1, 9)[dist.get_rank()]
    x, (weights, ids) = rows(n, 3), FIRST_HALF(n, 3)
    experts = planned("glm", chunk_tokens=CHUNK, max_chunks=64)
    leaves = x.requires_grad_(), weights.requires_grad_()
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    alive, taken = [], []
    original = Outward.take

    def watched(*args: Any) -> torch.Tensor:
        alive.append(sum(found() is not None for found in taken))
        found = original(*args)
        taken.append(weakref.ref(found))
        return found

    gc.disable()
    with replaced(Outward, "take", watched):
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out = run(experts, *leaves, ids)
        assert sorted(saved.values()) == sorted([n * DIM * 8, n * TOP_K * 4, n * TOP_K * 8])
        forward = len(alive)
        out.backward(rows(n, 7))
    gc.enable()
    # Of every part of a chunk, forward takes the rows; backward these twice, and their gradients.
    assert alive == [0] * 4 * forward and forward >= 4
    assert not any(found() is not None for found in taken)


def check_disagreement() -> None:
    """Before anything is sent, on every rank; each kind of setting, also of one chunk only."""
    odd = dist.get_rank() % 2
    several = {"chunk_tokens": CHUNK, "max_chunks": 64}
    forms: list[tuple[dict[str, Any], str]] = [
        (several | {"chunk_tokens": CHUNK + odd}, "chunk_tokens 9"),
        (several | {"minimum_rows": 1 + odd}, "minimum_rows 2"),
        ({"capacity_factor": 1.0 + odd * 2**-52}, "capacity_factor 1.0000000000000002"),
        ({"threshold": 1 + odd * 0.5}, "threshold 1.5"),
        (several if odd else {}, "chunk_tokens 8, max_chunks 64"),
    ]
    for form, says in forms:
        experts = planned("glm", **({"capacity_factor": 1.0} | form))
        with pytest.raises(DisagreementError, match=f"different settings.* ranks? 1.*: .*{says}"):
            run(experts, rows(9, 0), *routing(9))


def check_questions() -> None:
    """Ranks compare their settings once. Each layer's host reads once, for the counts and for the
    number of chunks, which follows the fullest rank; nothing in backward."""
    for form in ({}, {"chunk_tokens": CHUNK, "max_chunks": 64, "membership": "contiguous"}):
        experts, calls = planned("glm", **({"threshold": 1.0} | form)), []
        with counted(module, "agree", calls):
            for most in (CHUNK, 2 * CHUNK + 1, 1):
                n = 1 if dist.get_rank() else most
                x, (weights, ids) = rows(n, 0).requires_grad_(), routing(n)
                before = Watched.reads
                out = run(experts, x, weights, ids.as_subclass(Watched))
                out.backward(rows(n, 7))
                assert Watched.reads - before == 1
                assert experts.latest is not None
                assert experts.latest.chunks == (-(-most // CHUNK) if form else 1)
        assert calls == ["agree"]
