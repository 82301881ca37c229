"""Two ranks with streamed optimizers: one share for both, one message of both."""

from pathlib import Path

import pytest
import torch.distributed as dist

from components.offload.claim import gather
from components.streamed_adamw.engine import Engine
from components.streamed_adamw.split import Measured
from components.titan.streamed_optimizer import NonFiniteGradient
from tests.distributed.spawn import run_ranks
from tests.unit.streamed_parts import OWNER, backward, parts, streamed

pytestmark = pytest.mark.distributed


def rank_of_two() -> None:
    """A rank that measures a share of its own and has a gradient of its own that is broken."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    measured = Measured(1000, 1.0, 1.0, 0.5, (0.25, 0.75)[rank])
    Engine.measure = lambda self: measured  # type: ignore[method-assign]
    model_parts = parts()
    container = streamed(model_parts, split="auto", cpu_threads=None)
    shares = gather([each.share for each in container])
    halves = streamed(parts(), split=0.5, owner="components.other")
    assert shares == [[each.share for each in halves]] * 2
    halves.close()

    backward(model_parts, 0)
    broken = (model_parts[0].b, model_parts[1].c)[rank]
    broken.weight.grad[1, 2] = float("inf")
    with pytest.raises(NonFiniteGradient) as raised:
        container.step()
    first, second = gather(str(raised.value))
    assert first == second and "2 of 6 weights (b.weight, c.weight) hold" in first
    container.close()

    key = rf"{OWNER}\.cpu_threads: 100000 is more than"
    with pytest.raises(ValueError, match=key):
        streamed(parts(), cpu_threads=100_000)
    dist.destroy_process_group()


def test_two_ranks_agree(tmp_path: Path) -> None:
    run_ranks(rank_of_two, 2, tmp_path / "errors")
