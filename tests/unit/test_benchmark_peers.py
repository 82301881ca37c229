"""Kernels of others in the benchmarks: the folder they are fetched to, what they are given."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.sparse_mla import naive
from kernels.sparse_mla.inputs import Inputs as SparseInputs
from kernels.sparse_mla.inputs import draw_inputs
from tests.benchmarks import __main__ as command
from tests.benchmarks import indexer_peers, sparse_mla_peers
from tests.benchmarks.case import Device, Outputs, Runnable, Size, Variant
from tests.benchmarks.cases import indexer, sparse_mla, sparse_mla_backward
from tests.benchmarks.fakes import QuickProbe, fake_case, machine, steady, variant
from tests.benchmarks.fetched import Fetched
from tests.benchmarks.harness import Options, compare, run_case
from tests.benchmarks.indexer_inputs import Inputs, make_inputs

# Made up, with the names and the conventions of the public files: keys later than the query are
# skipped, logarithms are to the base of 2, gradients of keys cover all keys that were given.
FAKES = {
    "utils.py": "import torch\nFORMAT = torch.float8_e4m3fn\n",
    "sparse_mla_fwd.py": """
import math, torch
import utils

def scores(q, kv, indices, scale):
    assert q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()
    assert indices.dtype == torch.int32 and indices.shape[-1] % 64 == 0
    assert 0 <= indices.min() and indices.max() < kv.shape[1]
    ids = indices[0, :, 0].long()
    keys = kv[0, :, 0][ids]
    logits = torch.einsum("thd,tkd->thk", q[0], keys) * scale
    late = ids > torch.arange(len(ids)).unsqueeze(1)
    return logits.masked_fill(late.unsqueeze(1), float("-inf")), keys

def sparse_mla_fwd_interface(q, kv, indices, sm_scale=None):
    logits, keys = scores(q, kv, indices, sm_scale)
    out = torch.einsum("thk,tkd->thd", logits.softmax(-1), keys[..., : q.shape[-1] - 64])
    return out.unsqueeze(0), logits.logsumexp(-1).unsqueeze(0) / math.log(2)
""",
    "sparse_mla_bwd.py": """
import math, torch
from sparse_mla_fwd import sparse_mla_fwd_interface

def sparse_mla_bwd(q, kv, o, do, indices, lse, sm_scale=None):
    q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
    out, again = sparse_mla_fwd_interface(q, kv, indices, sm_scale)
    assert torch.equal(out, o) and torch.equal(again, lse)
    return torch.autograd.grad(out, (q, kv), do)
""",
    "fp8_lighting_indexer.py": """
import torch
from utils import FORMAT

def mqa_attn_return_logits_interface(q, kv, kv_scales, weights, begins, ends, clean_logits=True):
    assert q.dtype == kv.dtype == FORMAT and ends.dtype == begins.dtype == torch.int32
    assert not clean_logits and len(kv) >= ends.max() and not begins.any()
    products = torch.einsum("qhd,pd->qhp", q.float(), kv.float()).relu()
    return torch.einsum("qhp,qh->qp", products, weights) * kv_scales
""",
    "topk_selector.py": """
import torch

def tl_topk(scores, starts, ends, topk):
    late = torch.arange(scores.shape[1]) >= ends.unsqueeze(1)
    ids = scores.masked_fill(late, float("-inf")).topk(min(topk, scores.shape[1])).indices.int()
    return torch.nn.functional.pad(ids, (0, topk - ids.shape[1]))
""",
}


@pytest.fixture(name="fetched")
def _fetched(tmp_path: Path) -> Fetched:
    for name, text in FAKES.items():
        (tmp_path / name).write_text(text)
    return Fetched(folder=tmp_path)


# The folder


def test_file_finds_its_neighbours_and_hides_no_other_module(
    fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("utils")
    monkeypatch.setitem(sys.modules, "utils", other)
    path = list(sys.path)
    module = fetched.load("fp8_lighting_indexer.py")
    assert module.FORMAT is torch.float8_e4m3fn
    assert sys.modules["utils"] is other and "fp8_lighting_indexer" not in sys.modules
    assert sys.path == path
    assert fetched.load("fp8_lighting_indexer.py") is module


def test_two_folders_with_the_same_names_are_two_modules(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.py").write_text(f"NAME = {name!r}\n")
    loaded = [Fetched(folder=tmp_path / name).load("kernel.py").NAME for name in "ab"]
    assert loaded == ["a", "b"]


def test_failed_import_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import surely_not_installed\n")
    path = list(sys.path)
    with pytest.raises(ImportError, match="surely_not_installed"):
        Fetched(folder=tmp_path).load("broken.py")
    assert sys.path == path and "broken" not in sys.modules


def test_without_a_folder_nothing_is_there() -> None:
    assert Fetched().missing(("a.py",)) == ["a.py"]
    with pytest.raises(ValueError, match=r"--peers: not given.*a\.py"):
        Fetched().load("a.py")


def _run(peer: Variant, fetched: Fetched):
    options = Options(warmup=0, repeats=1)
    case = fake_case(variant("a"), peer)
    return run_case(case, "small", QuickProbe(), machine(), options, steady, peers=fetched)


@pytest.mark.parametrize("with_folder", [True, False])
def test_variant_says_which_file_it_lacks(fetched: Fetched, with_folder: bool) -> None:
    def build(*_: object) -> Runnable:
        raise AssertionError("built")

    there = fetched if with_folder else Fetched()
    lacking = Variant(name="b", role="peer", build=build, files=("utils.py", "absent.py"))
    result = _run(lacking, there).results[1]
    names = "absent.py" if with_folder else "utils.py, absent.py"
    assert result.status == "not installed"
    assert result.reason == f"needs {names} in the folder given by --peers"


def test_variant_with_files_gets_the_folder(fetched: Fetched) -> None:
    def build(x: torch.Tensor, device: Device, folder: Fetched) -> Runnable:
        twice = folder.load("twice.py").twice
        return Runnable(call=lambda: {"y": twice(x)})

    fetched.path("twice.py").write_text("def twice(x):\n    return x + x\n")
    measured = _run(Variant(name="b", role="peer", build=build, files=("twice.py",)), fetched)
    assert measured.results[1].timing is not None
    assert measured.best_peer is measured.results[1]


# What a variant declares


def test_variant_that_computes_something_else_is_checked_by_itself_and_is_no_best_peer() -> None:
    def build(x: torch.Tensor, device: Device) -> Runnable:
        return Runnable(call=lambda: {"half": x / 2})

    def check(x: torch.Tensor, outputs: Outputs) -> dict[str, float]:
        return compare({"y": 4 * outputs["half"]}, {"y": 2 * x})

    other = Variant(name="b", role="peer", build=build, check=check)
    measured = _run(other, Fetched())
    assert (measured.results[1].status, measured.results[1].errors) == ("ok", {"y": 0.0})
    assert measured.best_peer is None
    other = Variant(name="b", role="peer", build=build, check=lambda x, outputs: {"y": 0.5})
    wrong = _run(other, Fetched()).results[1]
    assert (wrong.status, wrong.reason) == ("wrong", "y error 0.5 > 1e-06")


def test_variant_unfit_for_a_size_says_why() -> None:
    left_out = variant("b", unfit=lambda size: f"N = {size.shape['N']} is too many")
    result = _run(left_out, Fetched()).results[1]
    assert (result.status, result.reason) == ("not supported", "N = 4 is too many")


@pytest.mark.parametrize(
    "case", [indexer, sparse_mla, sparse_mla_backward], ids=lambda m: m.__name__
)
def test_only_the_longest_sizes_leave_plain_torch_out(case: ModuleType) -> None:
    longest = {"1m"} if case is indexer else {"128k"}
    out = {name for name, size in case.CASE.sizes.items() if case.too_long(size)}
    assert out == longest


def test_folder_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sparse_mla", "--device", "cpu", "--peers", "no/such"]) == 2
    assert "--peers: 'no/such' is not a folder" in capsys.readouterr().err


# Sparse attention

LENGTHS = (1, 2, 3, 5, 90, 27)


def _problem() -> SparseInputs:
    return draw_inputs(LENGTHS, heads=3, width=8, count=7, dtype=torch.float64)


def _fake_flash_mla(q, kv, ids, scale, topk_length):
    assert ids.shape[1:] == (1, 128)
    slot = torch.arange(128)
    used = slot < topk_length.unsqueeze(1)
    assert torch.equal(ids[:, 0] >= 0, used)
    keys = kv[:, 0][ids[:, 0].long()]
    logits = torch.einsum("thd,tkd->thk", q, keys) * scale
    logits = logits.masked_fill(~used.unsqueeze(1), float("-inf"))
    return torch.einsum("thk,tkd->thd", logits.softmax(-1), keys), None, logits.logsumexp(-1)


def _module(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def test_forward_peers_compute_what_ours_compute(
    fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _problem()
    fake = _module("flash_mla", flash_mla_sparse_fwd=_fake_flash_mla)
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    wanted = sparse_mla.reference(inputs)
    for runnable in (
        sparse_mla_peers.example_forward(inputs, "cpu", fetched),
        sparse_mla_peers.flash_mla(inputs, "cpu"),
    ):
        assert max(compare(runnable.call(), wanted).values()) < 1e-6


def test_backward_peers_compute_what_ours_compute(
    fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _problem()

    def cudnn(q, kv, out, dout, lse, sink, ids, softmax_scale, topk_length):
        q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
        got, _, again = _fake_flash_mla(q, kv[:, None], ids[:, None], softmax_scale, topk_length)
        torch.testing.assert_close(got, out)
        torch.testing.assert_close(again, lse.to(again.dtype))
        assert sink.shape == q.shape[1:2] and bool((sink == float("-inf")).all())
        dq, dkv = torch.autograd.grad(got, (q, kv), dout)
        return {"dq": dq, "dkv": dkv, "d_sink": None}

    name = "cudnn.deepseek_sparse_attention"
    monkeypatch.setitem(sys.modules, "cudnn", _module("cudnn"))
    fake = _module(name, sparse_attention_backward_wrapper=cudnn)
    monkeypatch.setitem(sys.modules, name, fake)
    forward = "kernels.sparse_mla.tilelang_forward.forward"
    monkeypatch.setattr(forward, naive.forward_reference)
    wanted = sparse_mla_backward.reference(inputs)
    for runnable in (
        sparse_mla_peers.example_backward(inputs, "cpu", fetched),
        sparse_mla_peers.cudnn_backward(inputs, "cpu"),
    ):
        assert max(compare(runnable.call(), wanted).values()) < 1e-6


def test_unused_slots_are_in_bounds_after_every_query_and_spread() -> None:
    inputs = _problem()
    ids, used = sparse_mla_peers.token_ids(inputs, 64)
    masked = sparse_mla_peers.masked_ids(inputs, 64)
    assert torch.equal(masked[used], ids[used])
    unused = masked[~used]
    assert unused.min() >= len(inputs.latent) and unused.max() < len(inputs.latent) + 64
    # No key stands for two slots of a query that has one block.
    assert all(len(set(row.tolist())) == len(row) for row in masked)


# The indexer


def _inputs(stage: str) -> Inputs:
    size = Size(shape={"T": 1024, "Q": 256, "H": 4, "D": 16, "K": 24}, dtype="bfloat16")
    return make_inputs(size, "cpu", 0, stage)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [4, 8, 4096])
def test_chunks_cover_all_queries_once_and_all_their_pools(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_peers, "_CHUNK_QUERIES", step)
    monkeypatch.setattr(indexer_peers, "_KEY_BLOCK", 16)
    inputs = _inputs("timing")
    seen = torch.zeros(len(inputs.queries), dtype=torch.int)
    for rows, last, ends in indexer_peers.chunks(inputs):
        seen[rows] += 1
        part = rows.start // inputs.run
        token = inputs.begins[part] + torch.arange(rows.start, rows.stop) - part * inputs.run
        assert torch.equal(ends, ((token + 1) // 4).int())
        assert ends.max() <= last <= min(len(inputs.keys), ends.max() + 16)
    assert bool((seen == 1).all())


Build = Callable[[Inputs, Device, Fetched], Runnable]
Check = Callable[[Inputs, Outputs], dict[str, float]]
BOTH: list[tuple[Build, Check]] = [
    (indexer_peers.scores, indexer_peers.check_scores),
    (indexer_peers.selection, indexer_peers.check_selection),
]


@pytest.mark.parametrize(("build", "check"), BOTH)
def test_indexer_peer_is_exact_at_the_gate(fetched: Fetched, build: Build, check: Check) -> None:
    inputs = _inputs("gate")
    errors = check(inputs, build(inputs, "cpu", fetched).call())
    assert list(errors.values()) == [0.0]
    assert errors.keys() <= indexer.tolerance(indexer.CASE.sizes["32k"]).keys()


def test_scores_are_not_kept_when_timed(fetched: Fetched) -> None:
    assert indexer_peers.scores(_inputs("timing"), "cpu", fetched).call() == {}


def test_wrong_scores_are_seen(fetched: Fetched) -> None:
    inputs = _inputs("gate")
    outputs = indexer_peers.scores(inputs, "cpu", fetched).call()
    next(iter(outputs.values()))[:, 0] += 100
    assert indexer_peers.check_scores(inputs, outputs)["scores"] > 1e-2


@pytest.mark.parametrize(
    ("column", "value", "least"),
    [
        pytest.param(0, lambda ids: ids[:, 1], float("inf"), id="twice"),
        pytest.param(0, lambda ids: 255, float("inf"), id="not open"),
        pytest.param(0, lambda ids: -1, float("inf"), id="none"),
        pytest.param(slice(None), lambda ids: torch.arange(24), 1e-2, id="not the best"),
    ],
)
def test_wrong_choice_is_seen(fetched: Fetched, column, value, least: float) -> None:
    inputs = _inputs("gate")
    outputs = indexer_peers.selection(inputs, "cpu", fetched).call()
    ids = outputs["ids"]
    ids[:200, column] = torch.as_tensor(value(ids[:200])).int()
    assert indexer_peers.check_selection(inputs, outputs)["chosen scores"] >= least
