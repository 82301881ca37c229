"""Configurations kept as files: which machine they are for, and how Triton finds them."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.kda import one_form
from kernels.tuned import __main__ as tune
from kernels.tuned import fla
from kernels.tuned.fla import Entry, Kernel, Tuned

ROOT = Path(__file__).resolve().parents[2]
ENTRY = Entry([64, 5, "torch.bfloat16", True], {"BT": 8}, 4, 3)


def tuned(**kernels: Kernel) -> Tuned:
    return Tuned("NVIDIA H200", fla.installed(), kernels)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of fla's kind: one kernel tuned inside a heuristic, one not tuned."""
    made = ModuleType("fla.made_up")
    inner = SimpleNamespace(
        cache={},
        configs=[1, 2],
        keys=["D", "NB"],
        base_fn=SimpleNamespace(__module__="fla.made_up"),
        fn=None,
    )
    vars(made).update(norm=SimpleNamespace(fn=inner), plain=SimpleNamespace(fn=lambda: 0))
    monkeypatch.setitem(sys.modules, "fla.made_up", made)
    return made


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    given = tuned(
        norm=Kernel("fla.made_up", [ENTRY, replace(ENTRY, key=[64, 9], kwargs={})]),
        other=Kernel("fla.other", [ENTRY]),
    )
    fla.write(given, tmp_path / "file.json")
    read = fla.read(tmp_path / "file.json")
    assert read.kernels["other"] == given.kernels["other"] and read.versions == given.versions
    assert sorted(map(str, read.kernels["norm"].entries)) == sorted(
        map(str, given.kernels["norm"].entries)
    )
    again = tmp_path / "again.json"
    fla.write(read, again)
    assert again.read_text() == (tmp_path / "file.json").read_text()


def test_a_file_counts_for_its_gpu_and_its_versions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fla.write(tuned(), fla.path_of("NVIDIA H200", tmp_path))
    assert fla.find("NVIDIA H200", tmp_path) == (tuned(), "tuned for NVIDIA H200")
    found, note = fla.find("NVIDIA B200", tmp_path)
    assert found is None and note == (
        "not tuned for NVIDIA B200, so fla measures before the first step (make tune)"
    )
    monkeypatch.setattr(fla, "installed", lambda: {"fla-core": "0.7.0", "triton": "3.8.0"})
    found, note = fla.find("NVIDIA H200", tmp_path)
    assert found is None and "this is fla-core 0.7.0, triton 3.8.0, so fla measures" in note


def test_entries_become_what_triton_remembers(module: ModuleType) -> None:
    known = module.norm.fn.cache
    known[(7,)] = "found here"
    kernel = Kernel("fla.made_up", [ENTRY, replace(ENTRY, key=[7])])
    assert fla.seed(tuned(norm=kernel)) == 1
    config = known[(64, 5, "torch.bfloat16", True)]
    assert (config.kwargs, config.num_warps, config.num_stages) == ({"BT": 8}, 4, 3)
    assert known[(7,)] == "found here" and len(known) == 2


def test_shares_of_the_heads_take_what_all_heads_took(module: ModuleType) -> None:
    """Not the tile that is tuned, nor a width that happens to be as many."""
    module.norm.fn.keys = ["BT", "HV", "K", "BV"]
    own = replace(ENTRY, key=[4, 6, 6], kwargs={"BT": 32}, num_warps=8)
    kernel = Kernel("fla.made_up", [replace(ENTRY, key=[12, 12, 6], kwargs={"BT": 16}), own])
    known = module.norm.fn.cache
    fla.seed(tuned(norm=kernel), shares=False)
    assert set(known) == {(12, 12, 6), (4, 6, 6)}
    fla.seed(tuned(norm=kernel))
    assert {key: known[key].num_warps for key in known} == {
        (12, 12, 6): 4, (6, 12, 6): 4, (3, 12, 6): 4, (4, 6, 6): 8, (2, 6, 6): 8, (1, 6, 6): 8,
    }  # fmt: skip


def test_every_kernel_of_the_shipped_files_says_where_its_heads_are() -> None:
    for path in fla.FOLDER.glob("fla_*.json"):
        for name, kernel in fla.read(path).kernels.items():
            tuner = fla.autotuner(kernel.module, name)
            places = fla.head_places(name, tuner.keys, kernel.entries)
            heads = {entry.key[place] for entry in kernel.entries for place in places}
            whole = 8192 if name in fla.CHANNELS else 64
            assert heads == ({whole} if places else set()), name
            assert bool(places) != name.startswith("l2norm"), name


def test_a_kernel_that_is_not_tuned_is_no_kernel_of_the_file(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="fla.made_up.plain is not tuned by Triton"):
        fla.seed(tuned(plain=Kernel("fla.made_up", [ENTRY])))


def test_what_was_measured_is_collected_where_it_is_defined(module: ModuleType) -> None:
    other = ModuleType("fla.importing")
    other.norm = module.norm  # type: ignore[attr-defined]
    sys.modules["fla.importing"] = other
    config = SimpleNamespace(kwargs={"BT": 16}, num_warps=2, num_stages=4)
    module.norm.fn.cache[(64, "torch.float32")] = config
    try:
        found = tune.collect()
    finally:
        del sys.modules["fla.importing"]
    assert found["norm"] == Kernel("fla.made_up", [Entry([64, "torch.float32"], {"BT": 16}, 2, 4)])


def test_tuning_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main() == 2
    assert "measures on a GPU" in capsys.readouterr().err
    assert fla.note() == ""


def test_an_argument_that_tuning_does_not_know_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune.main(["--all"]) == 2
    assert "--all: legal is --add, or nothing" in capsys.readouterr().err


def test_forms_are_those_that_context_parallelism_calls_too() -> None:
    made = list(tune.forms())
    assert len(made) == len(set(made)) == 12
    assert {form.heads for form in made} == {64, 32, 16, 8}
    assert all((f.lengths, f.entering, f.carries) == ((tune.TOKENS,), False, False)
               for f in made if f.heads < 64)  # fmt: skip
    (wide,) = (form for form in made if form.values != 128)
    assert (wide.values, wide.entering, wide.carries, wide.backward) == (256, True, True, False)


def test_every_form_is_called_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.kda import fla as kda
    from kernels.short_conv import fla as conv

    seen: list[Any] = []
    convolved: list[tuple[int, ...]] = []

    def kda_piece(*given: Any, lower_bound: float, carries: bool) -> Any:
        q, _, v, *_, lengths, state = given
        seen.append((lengths, q.shape[1], v.shape[2], state is not None, carries, q.requires_grad))
        out = sum(x.float().sum() for x in given[:7]) * torch.ones(len(q), 1, 1)
        left = None if not carries else out.sum() + (0 if state is None else state.sum())
        return out, left

    def short_conv(x: Any, taps: Any, position: torch.Tensor, lengths: Any) -> Any:
        assert position.tolist() == [i for length in lengths for i in range(length)]
        convolved.append(tuple(x.shape))
        return x * taps.sum()

    monkeypatch.setattr(kda, "kda_piece", kda_piece)
    monkeypatch.setattr(conv, "short_conv", short_conv)
    monkeypatch.setattr(tune, "WIDTH", 4)
    some = [
        tune.Form((6,), 8, 4), tune.Form((6,), 8, 4, carries=True), tune.Form((2, 4), 8, 4),
        tune.Form((6,), 2, 4), tune.Form((6,), 8, 8, entering=True, carries=True, backward=False),
    ]  # fmt: skip
    tune.exercise(torch.device("cpu"), some)
    assert seen == [
        (form.lengths, form.heads, form.values, form.entering, form.carries, form.backward)
        for form in some
    ]
    assert convolved == [(6, 32), (6, 32), (6, 8)]


def test_what_a_file_lacks_is_added_and_what_it_has_stays() -> None:
    far, new = replace(ENTRY, key=[64, 9]), replace(ENTRY, key=[16, 5])
    held = {"norm": Kernel("fla.made_up", [ENTRY])}
    known = {"norm": {tuple(ENTRY.key), tuple(far.key)}}
    # Seeded keys, a new one, a kernel with nothing new, and one that is new.
    found = {
        "norm": Kernel("fla.made_up", [ENTRY, far, new]),
        "other": Kernel("fla.made_up", [new]),
    }
    merged = tune.added(held, found, known)
    assert merged == {
        "norm": Kernel("fla.made_up", [ENTRY, new]), "other": found["other"],
    }  # fmt: skip
    assert tune.added({}, found, {}) == found


@pytest.mark.parametrize("add", [False, True])
def test_tuning_writes_both_files(
    add: bool, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for fla measures one new key, and what it does not remember."""
    path = fla.path_of("NVIDIA H200", tmp_path)
    kept = replace(ENTRY, key=[64], kwargs={"BT": 99})
    fla.write(tuned(norm=Kernel("fla.made_up", [kept])), path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(tune, "path_of", lambda gpu: path)
    found = fla.find
    monkeypatch.setattr(tune, "find", lambda gpu: found(gpu, tmp_path))
    monkeypatch.setattr(tune, "use", lambda shares: fla.seed(fla.read(path), shares))
    others: list[int] = []
    monkeypatch.setattr(tune.sparse_mla, "main", lambda: others.append(1))

    def measure(device: torch.device, chosen: Any) -> None:
        config = SimpleNamespace(kwargs={"BT": 16}, num_warps=2, num_stages=4)
        for key in ((64,), (16,)):
            module.norm.fn.cache.setdefault(key, config)

    monkeypatch.setattr(tune, "exercise", measure)
    assert tune.main(["--add"] if add else []) == 0 and others == [1]
    tiles = {entry.key[0]: entry.kwargs["BT"] for entry in fla.read(path).kernels["norm"].entries}
    assert tiles == {64: 99 if add else 16, 16: 16}
    assert path.with_suffix(".json.old").exists() != add


def test_the_gpu_is_told_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert fla.note() == "tuned for NVIDIA H200"


def shipped() -> list[Tuned]:
    return [fla.read(path) for path in sorted(fla.FOLDER.glob("fla_*.json"))]


def test_shipped_files_are_for_the_locked_versions() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    locked = {p: re.search(rf"^{p}==(\S+)", lock, re.M) for p in fla.PACKAGES}
    versions = {package: found and found[1] for package, found in locked.items()}
    assert shipped() and all(held.versions == versions for held in shipped())


@pytest.mark.slow
def test_shipped_entries_fit_the_kernels_they_are_for() -> None:
    """Which warps and stages are tried depends on the GPU; names of tile sizes do not."""
    for held in shipped():
        for name, kernel in held.kernels.items():
            found: Any = fla.autotuner(kernel.module, name)
            names = {frozenset(config.kwargs) for config in found.configs}
            for entry in kernel.entries:
                assert names == {frozenset(entry.kwargs)}, name
                assert len(entry.key) > len(found.keys)
            if name in one_form.KERNELS:
                place = found.keys.index("NB")
                assert {entry.key[place] for entry in kernel.entries} == {one_form.BLOCKS}
