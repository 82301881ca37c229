"""On a GPU: the vocabulary loss's kernels and schedules, and rings of two GPUs where there are two.

Run with `make test ARGS="-m gpu"`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torchtitan.tools.utils

from components.vocabulary.fused import fused
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.move_activations import move_activations
from components.vocabulary.move_weights import move_weights
from components.vocabulary.strips import strip_buffer, strip_bytes
from components.vocabulary.tokens import IGNORED
from kernels.vocabulary_loss import naive
from kernels.vocabulary_loss.op import fold_strip, gradient_
from kernels.vocabulary_loss.state import new_state, normaliser
from tests.distributed.test_vocabulary_loss import check, problems
from tests.unit.vocabulary_support import make_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

MIB = 2**20
NOTHING = float("-inf")
MOVES = pytest.mark.parametrize("move", [move_weights, move_activations])


def draw_strip(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits with rows and parts of rows at -inf, inside a buffer with longer rows."""
    random = torch.Generator(device="cuda").manual_seed(width)
    strip = strip_buffer(rows, width, torch.empty(0, dtype=dtype, device="cuda"))
    strip.copy_(torch.randn(rows, width, generator=random, device="cuda") * 4)
    strip[0] = NOTHING
    strip[1, : width // 2] = NOTHING
    return strip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 4096, 4097, 25_001])
@pytest.mark.parametrize("entropy", [False, True])
def test_kernels_equal_plain_torch(dtype: torch.dtype, width: int, entropy: bool) -> None:
    strip, rows = draw_strip(65, width, dtype), 65
    columns = torch.randint(-1, width, (rows,), device="cuda")
    states = []
    for fold in (fold_strip, naive.fold_strip):
        state = new_state(rows, entropy=entropy, dtype=torch.float32, device=strip.device)
        state[0, 2:9], state[1, 2:9] = 3.0, 2.0  # columns of another strip
        fold(strip, columns, state)
        states.append(state)
    torch.testing.assert_close(*states, rtol=2e-6, atol=2e-5)
    lse = normaliser(states[1])
    lse[0] = 0.0  # its other strips are elsewhere
    for scale in (torch.tensor(0.3, device="cuda"), torch.rand(rows, device="cuda")):
        ours, plain = strip.clone(), strip.clone()
        gradient_(ours, columns, lse, scale)
        naive.gradient_(plain, columns, lse, scale)
        bound = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(ours, plain, rtol=bound, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kernels_do_not_hide_what_is_no_number(value: float) -> None:
    strip = draw_strip(8, 5000, torch.bfloat16)
    strip[0], strip[1] = 1.0, 1.0
    strip[2] = value
    strip[3, 4999] = value
    state = new_state(8, entropy=False, dtype=torch.float32, device=strip.device)
    fold_strip(strip, torch.zeros(8, dtype=torch.int64, device="cuda"), state)
    assert normaliser(state).isnan().tolist() == [False, False, True, True] + [False] * 4


def test_kernels_reach_beyond_two_to_the_31() -> None:
    rows, width = 2**31 // 200_000 + 2, 200_000
    strip = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    strip[-1, -1] = 9.0
    columns = torch.full((rows,), width - 1, device="cuda")
    state = new_state(rows, entropy=False, dtype=torch.float32, device=strip.device)
    fold_strip(strip, columns, state)
    lse = normaliser(state)
    expected = strip[-1].float().logsumexp(0)
    torch.testing.assert_close(lse[-1], expected)
    torch.testing.assert_close(lse[0], torch.tensor(float(width), device="cuda").log())
    gradient_(strip, columns, lse, torch.ones((), device="cuda"))
    torch.testing.assert_close(
        strip[-1, -1].float(), (9.0 - expected).exp() - 1, rtol=2**-7, atol=0
    )
    torch.testing.assert_close(strip[-1, 0].float(), (-expected).exp(), rtol=2**-7, atol=0)


TOKENS, WIDTH, VOCABULARY = 3000, 1024, 50_001
ALONE = VocabularyLayout(VOCABULARY, 1, 1)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=random, device="cuda", dtype=dtype)
    w = torch.randn(VOCABULARY, WIDTH, generator=random, device="cuda", dtype=dtype)
    w *= 3 / WIDTH**0.5
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=random, device="cuda")
    targets[::17] = IGNORED
    return x, w, targets


def definition(
    x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss summed, dX and dW of the mean, in float64."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ w.t(), targets, reduction="sum")
    (loss / (targets != IGNORED).sum()).backward()
    assert x.grad is not None and w.grad is not None
    return loss.detach(), x.grad, w.grad


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("dtype", "dw_dtype", "bound"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.bfloat16, torch.bfloat16, 2e-2),
    ],
)
def test_fused_equals_the_definition(
    dtype: torch.dtype, dw_dtype: torch.dtype, bound: float
) -> None:
    x, w, targets = operands(dtype)
    loss, dx, dw = definition(x, w, targets)
    found_dw = torch.zeros_like(w, dtype=dw_dtype)
    scale = (targets != IGNORED).sum().float().reciprocal()
    found, found_dx = fused(x, w, targets, ALONE, None, scale=scale, rows=1000, dw=found_dw)
    assert found_dx is not None
    assert relative(found, loss) < min(bound, 1e-3)
    assert relative(found_dx, dx) < bound and relative(found_dw, dw) < bound


@MOVES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_moves_equal_the_definition(move: Callable, dtype: torch.dtype, bound: float) -> None:
    x, w, targets = operands(dtype)
    loss, dx, dw = definition(x, w, targets)
    x.requires_grad_()
    found_dw = torch.zeros_like(w, dtype=torch.float32)
    log_p, entropy = move(x, w, targets, ALONE, None, rows=1000, dw=found_dw)
    (-log_p.sum() / (targets != IGNORED).sum()).backward()
    assert relative(-log_p.detach().sum(), loss) < min(bound, 1e-3)
    assert x.grad is not None
    assert relative(x.grad, dx) < bound and relative(found_dw, dw) < bound
    with torch.no_grad():
        log_all = torch.log_softmax(x.double() @ w.double().t(), 1)
    expected = -(log_all.exp() * log_all).sum(1) * (targets != IGNORED)
    assert relative(entropy, expected) < bound


def test_one_strip_and_no_copy_of_it_is_held() -> None:
    """Beside results and strip: hidden states of the counted tokens of a strip, and little else."""
    x, w, targets = operands(torch.bfloat16)
    dw, scale, rows = torch.zeros_like(w, dtype=torch.float32), torch.ones((), device="cuda"), 1000
    arguments = x, w, targets, ALONE, None
    fused(*arguments, scale=scale, rows=rows, dw=dw)  # workspaces of the matrix products
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused(*arguments, scale=scale, rows=rows, dw=dw)
    grown = torch.cuda.max_memory_allocated() - before
    strip = strip_bytes(rows, VOCABULARY, torch.bfloat16)
    small = 2 * x.nbytes + 4 * MIB
    assert strip < grown < strip + small < 1.5 * strip


def rank_of_two(rank: int, folder: str) -> None:
    """One GPU of a ring of two, over NCCL."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device
    )
    # New memory is filled with nan: a message that is read before it has arrived would show.
    torch.use_deterministic_algorithms(True, warn_only=True)
    world = dist.group.WORLD
    assert world is not None
    many = make_problem(VocabularyLayout(5001, 2, 2), [700, 900], hidden=64, seed=7)
    for name, problem in {**problems(2), "many rounds": many}.items():
        check(name, problem, [0, 1], world, device)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_ring_of_two_gpus_equals_one_process(tmp_path: Path) -> None:
    multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2)
