"""The output head on meshes of four ranks: what a rank computes with, and where gradients go."""

import itertools
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.config import TrainingConfig

from components.titan.head import RingHead, keep_head_sharded, rings_of
from components.titan.ring_loss import RingLoss
from tests.distributed.spawn import run_ranks

pytestmark = pytest.mark.distributed

MINUTE = timedelta(minutes=1)
WIDTH = 6
TOKENS = 10
MESHES = {
    "sharded": ((4,), ("dp_shard",)),
    "replicated twice": ((2, 2), ("dp_replicate", "dp_shard")),
    "replicated": ((4, 1), ("dp_replicate", "dp_shard")),
}
# 11 rows on 4 ranks: 3, 3, 3, 2. On 2: 6, 5. 5 rows on 4 ranks: 2, 2, 1, 0.
VOCABULARIES = (11, 5)
CPU = torch.device("cpu")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class Decoder(nn.Module):
    """As much of a decoder as hiding its head needs."""

    def __init__(self, vocabulary: int, trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(vocabulary)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.norm = Norm()
        self.trained = trained

    def freeze(self) -> None:
        self.lm_head.weight.requires_grad_(self.trained)


def sharded(vocabulary: int, mesh: DeviceMesh, trained: bool = True) -> Decoder:
    def parallelize(model: nn.Module, *, mesh: DeviceMesh, training: object) -> nn.Module:
        assert model.lm_head is None
        fully_shard(model, mesh=mesh)
        return model

    training = TrainingConfig(mixed_precision_param="bfloat16")
    model = keep_head_sharded(parallelize)(
        Decoder(vocabulary, trained), mesh=mesh, training=training
    )
    assert model.lm_head.working_dtype == torch.bfloat16
    return model


def cases() -> list[tuple[str, DeviceMesh, int, int]]:
    """Name, mesh, vocabulary and ring of every case, in one order on all ranks."""
    found = []
    for name, (shape, names) in MESHES.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for vocabulary, ring in itertools.product(VOCABULARIES, (1, 2, 4)):
            if shape[-1] % ring == 0:
                found.append((f"{name}, {vocabulary} on {ring}", mesh, vocabulary, ring))
    return found


def heads() -> None:
    """One rank: shards and gradients in every case, and what FSDP2 makes of the same head."""
    for name, mesh, vocabulary, ring in cases():
        whole = Decoder(vocabulary).lm_head.weight.detach()
        model = sharded(vocabulary, mesh)
        weight = model.lm_head.weight
        as_fsdp = fully_shard(Decoder(vocabulary).lm_head, mesh=mesh).weight
        assert described(weight) == described(as_fsdp), name
        assert torch.equal(weight.to_local(), as_fsdp.to_local()), name
        assert weight.requires_grad
        rings = rings_of(weight, ring, MINUTE)
        head = RingHead(model.lm_head, rings)
        rows = torch.cat([torch.arange(p.start, p.stop) for p in rings.layout.pieces(rings.q)])
        assert torch.equal(head.shard(torch.float32, CPU), whole[rows]), name
        rounded = head.shard(torch.bfloat16, CPU)
        assert torch.equal(rounded, whole[rows].bfloat16()), name
        assert rounded.is_contiguous()
        two_passes(head, rows, whole, name)
        check_gradient(weight, as_fsdp, whole, name)


def described(tensor: DTensor) -> tuple:
    """All that a checkpoint and gradient clipping ask of a sharded tensor."""
    local = tensor.to_local()
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), local.shape


def two_passes(head: RingHead, rows: torch.Tensor, whole: torch.Tensor, name: str) -> None:
    """Each rank adds its number + 1 times the weight, twice."""
    for _ in range(2):
        with head.gradient(CPU) as dw:
            assert dw is not None and dw.shape == (len(rows), WIDTH), name
            assert dw.dtype == torch.float32
            dw.add_(whole[rows], alpha=dist.get_rank() + 1)


def check_gradient(weight: nn.Parameter, as_fsdp: DTensor, whole: torch.Tensor, name: str) -> None:
    """Ranks of one ring hold different rows; the others' sums must have arrived."""
    gradient = weight.grad
    assert isinstance(gradient, DTensor) and described(gradient) == described(as_fsdp), name
    # Every row is somebody's in every ring, with that rank's factor.
    factors = gradient.full_tensor() / whole / 2
    ring_rows = factors[:, 0].round()
    torch.testing.assert_close(factors, ring_rows[:, None].expand_as(factors))
    expected = expected_factors(weight, len(whole))
    assert torch.equal(ring_rows, expected[name.rpartition(" ")[2]]), (name, ring_rows, expected)


def expected_factors(weight: DTensor, vocabulary: int) -> dict[str, torch.Tensor]:
    """Ring size -> for each row, the sum of (rank + 1) over the ranks that compute with it."""
    axis = weight.placements.index(Shard(0))
    table = weight.device_mesh.mesh.movedim(axis, -1).reshape(-1, weight.device_mesh.size(axis))
    ranks = table.shape[1]
    owners = torch.arange(vocabulary) // -(-vocabulary // ranks)
    found = {}
    for ring in (n for n in (1, 2, 4) if ranks % n == 0):
        sums = (table + 1).sum(0).view(-1, ring).sum(0).float()
        found[str(ring)] = sums[owners % ring]
    return found


def losses_of_schedules() -> None:
    """One rank: loss and gradients of every schedule on every mesh against float64."""
    with pytest.raises(AssertionError), NothingWhole(11):
        torch.ones(2, 11)
    for name, mesh, vocabulary, ring in cases():
        model = sharded(vocabulary, mesh)
        for schedule in ("fused", "move_weights", "move_activations"):
            # The least that 4 ranks can share: several strips.
            config = RingLoss.Config(degree=ring, schedule=schedule, strip_rows=4)
            loss = RingLoss(config)
            loss.set_lm_head(model.lm_head)
            check_loss(loss, model, f"{name}, {schedule}")


class NothingWhole(TorchDispatchMode):
    """Refuses tensors of this rank with a dimension as long as the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                assert self._vocabulary not in tensor.shape, (function, tensor.shape)
        return made


def tokens_of(rank: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (2, T / 2, H) and labels of a rank; rank 2 has no valid token."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=generator)
    labels = torch.randint(vocabulary, (2, TOKENS // 2), generator=generator)
    labels[:, : 2 if rank != 2 else None] = -100
    return hidden, labels


def check_loss(loss: RingLoss, model: Decoder, name: str) -> None:
    rank, whole = dist.get_rank(), Decoder(loss.rings.layout.vocabulary).lm_head.weight.detach()
    everyone = [tokens_of(r, len(whole)) for r in range(dist.get_world_size())]
    valid = torch.tensor(sum(int((labels != -100).sum()) for _, labels in everyone))
    wide = whole.double().requires_grad_()
    parts = [h.double().requires_grad_() for h, _ in everyone]
    entries = [
        nn.functional.cross_entropy(h.flatten(0, 1) @ wide.t(), labels.flatten(), reduction="none")
        for h, (_, labels) in zip(parts, everyone, strict=True)
    ]
    torch.cat(entries).sum().div(valid).backward()
    hidden, labels = everyone[rank]
    pred = hidden.clone().requires_grad_()
    model.lm_head.weight.grad = None
    ring = loss.rings.layout.ring
    # Five is also half a rank's tokens.
    budget = NothingWhole(len(whole)) if ring > 1 and len(whole) != 5 else nullcontext()
    with budget:
        found, _ = loss(pred, labels, valid)
        found.backward()
    close = {"rtol": 1e-5, "atol": 1e-6}
    expected = entries[rank].detach()
    torch.testing.assert_close(found.double(), expected.sum() / valid, **close)
    torch.testing.assert_close(pred.grad.double(), parts[rank].grad, **close)
    gradient = model.lm_head.weight.grad.full_tensor().double()
    torch.testing.assert_close(gradient, wide.grad, **close, msg=name)
    # A forward alone, as validation does it, and each token by itself.
    alone, _ = loss(hidden, labels)
    torch.testing.assert_close(alone.double(), expected.sum(), **close)
    logs, entropies = loss.log_probabilities(hidden, labels)
    torch.testing.assert_close(-logs.double().flatten(), expected, **close)
    spread = torch.distributions.Categorical(logits=hidden.double() @ whole.double().t()).entropy()
    torch.testing.assert_close(entropies.double(), spread * (labels != -100), **close)
    assert torch.equal(model.lm_head.weight.grad.full_tensor().double(), gradient)


def frozen_head() -> None:
    """One rank: gradients of hidden states alone."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    model = sharded(VOCABULARIES[0], mesh, trained=False)
    assert not model.lm_head.weight.requires_grad
    whole = Decoder(VOCABULARIES[0]).lm_head.weight.detach()
    loss = RingLoss(RingLoss.Config(strip_rows=4))
    loss.set_lm_head(model.lm_head)
    hidden, labels = tokens_of(dist.get_rank(), len(whole))
    pred, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss(pred, labels, torch.tensor(3))[0].backward()
    logits = (other @ whole.t()).flatten(0, 1)
    nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum").div(3).backward()
    torch.testing.assert_close(pred.grad, other.grad)
    assert model.lm_head.weight.grad is None


CHECKS = {
    "shards and gradients": heads,
    "every schedule equals float64": losses_of_schedules,
    "a frozen head gets no gradient": frozen_head,
}


def run_checks(folder: str) -> None:
    """One rank of all checks."""
    dist.init_process_group("gloo")
    for name, check in CHECKS.items():
        check()
        (Path(folder) / f"{name}.{dist.get_rank()}").touch()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of what has passed, and the first failure."""
    folder = tmp_path_factory.mktemp("ring_head")
    try:
        run_ranks(run_checks, 4, folder, str(folder))
    except AssertionError as failure:
        return folder, str(failure)
    return folder, ""


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_mesh_and_ring(check: str, ran: tuple[Path, str]) -> None:
    folder, failure = ran
    assert len(list(folder.glob(f"{check}.*"))) == 4, failure
