"""The Makefile hands words to the program as the user typed them. A stub stands in for Python."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1:3] in (["-m", "launch"], ["-m", "pytest"]):
    print(json.dumps({{"argv": sys.argv[3:], "env": dict(os.environ)}}))
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    path = tmp_path / "python stub"
    path.write_text(STUB)
    path.chmod(0o755)
    return path


def make(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
    return subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", *words],
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def run(stub: Path, *words: str, env: dict[str, str] | None = None) -> dict:
    done = make(*words, f"PYTHON={stub}", env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def overrides(stub: Path, *words: str) -> list[str]:
    argv = run(stub, "train", *words)["argv"]
    return argv[argv.index("--") + 1 :]


@pytest.mark.parametrize(
    "word",
    [
        "training.steps=20",
        "components.chunked_loss.enabled=true",
        "text=two words",
        "text=trailing  ",
        "text=looks like=another override=x",
        "text=tab\there",
        "list=[a,b]",
        "list=[a, b]",
        "mapping={a: 1, b: [c]}",
        "quoted='it''s'",
        'quoted="double"',
        "dollar=$HOME",
        "dollar=$(shell echo no)",
        "dollar=${RECIPE}",
        "backtick=`echo no`",
        "backslash=a\\b\\",
        "star=*.py",
        "semicolon=a; echo no",
        "hash=a # b",
        "comma=f(a,b)",
        "percent=50%",
        "+new.key=1",
        "group/sub=option",
        "empty=",
        "unicode=\u00e9",
    ],
)
def test_an_override_arrives_as_typed(stub: Path, word: str) -> None:
    assert overrides(stub, word) == [word]


def test_several_overrides_keep_their_order_and_values(stub: Path) -> None:
    words = ["a=x y=z", "b=\\", "c=1", "d=$", "e=' '"]
    assert overrides(stub, *words) == words


def test_keys_may_have_the_names_of_the_makefiles_own_variables(stub: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    own = re.findall(r"^_?([a-z_]+) :?=", makefile, re.MULTILINE)
    assert len(own) > 10
    words = [f"{name.lstrip('_')}=1" for name in own]
    assert overrides(stub, *words) == words


def test_of_a_repeated_key_the_last_counts(stub: Path) -> None:
    assert overrides(stub, "a=1", "b=2", "a=3") == ["a=3", "b=2"]


def test_overrides_variable_is_split_as_the_shell_does_but_matches_no_files(stub: Path) -> None:
    exotic = "OVERRIDES='k:=v' Make* [LM]* x=[a,b] 'y=[c, d]'"
    assert overrides(stub, "a=1", exotic) == [
        "a=1",
        "k:=v",
        "Make*",
        "[LM]*",
        "x=[a,b]",
        "y=[c, d]",
    ]


def test_settings_become_flags_and_no_overrides(stub: Path) -> None:
    words = ["launch", "RECIPE=a b/c.yaml", "ON=slurm", "NODES=8", "NGPU=4", "DRY=1", "VERBOSE=1"]
    assert run(stub, *words)["argv"] == [
        *["launch", "--recipe", "a b/c.yaml", "--on", "slurm", "--nodes", "8", "--ngpu", "4"],
        *["--dry", "--verbose", "--"],
    ]


def test_memory_takes_the_step_to_draw(stub: Path) -> None:
    assert run(stub, "memory")["argv"] == ["memory", "--recipe", "quickstart", "--"]
    argv = run(stub, "memory", "STEP=3", "NGPU=2", "training.seq_len=512")["argv"]
    flags = ["--ngpu", "2", "--step", "3", "--", "training.seq_len=512"]
    assert argv == ["memory", "--recipe", "quickstart", *flags]


def test_a_switch_set_to_zero_is_off(stub: Path) -> None:
    assert "--dry" not in run(stub, "launch", "DRY=0")["argv"]


def test_the_recipe_defaults_to_quickstart(stub: Path) -> None:
    assert run(stub, "train")["argv"] == ["train", "--recipe", "quickstart", "--"]


def test_new_takes_the_new_name_as_recipe(stub: Path) -> None:
    argv = run(stub, "new", "RECIPE=mine", "FROM=quickstart")["argv"]
    assert argv == ["new", "--recipe", "mine", "--from", "quickstart"]


def test_new_without_a_name_does_not_fall_back_to_the_default_recipe(stub: Path) -> None:
    assert run(stub, "new")["argv"] == ["new", "--recipe", ""]


def test_settings_exported_by_the_shell_are_ignored(stub: Path) -> None:
    env = {"NAME": "host", "RECIPE": "other", "DRY": "1", "NGPU": "3"}
    assert run(stub, "train", env=env)["argv"] == ["train", "--recipe", "quickstart", "--"]
    assert run(stub, "bench", env=env)["argv"] == ["bench", "--"]


def test_overrides_do_not_leak_into_the_environment(stub: Path) -> None:
    env = run(stub, "train", "training.steps=1", "lr=2", "NGPU=2")["env"]
    assert not {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "lr", "NGPU", "RECIPE"} & set(env)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], '"trian" is none of: train test'),
        (["train", "training.steps", "20"], "Overrides are one word each: key=value"),
        (["train", "training.steps", "=", "20"], "empty variable name"),
        (["train", "RECPE=x"], '"RECPE" is not a setting; they are: RECIPE'),
        (["train", "text=two\nlines"], "line break"),
        (["train", "text=two\nlines=3"], "line break"),
        (["recipes", "training.steps=1"], '"make recipes" takes no overrides'),
        (["test", "training.steps=1"], '"make test" takes no overrides'),
        (["bench", "NAME=x", "ARGS=--size full"], "ARGS goes to pytest"),
    ],
)
def test_a_slip_is_refused_before_anything_runs(stub: Path, words: list[str], message: str) -> None:
    done = make(*words, f"PYTHON={stub}")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_tests_run_in_two_processes_without_the_slow_ones(stub: Path) -> None:
    assert run(stub, "test", "ARGS=-k 'a or b'")["argv"] == [
        *["-m", "not slow", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"],
        *["-k", "a or b"],
    ]
    assert run(stub, "test", "JOBS=1")["argv"] == ["-m", "not slow"]


def test_help_explains_every_verb() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = makefile.partition("VERBS := ")[2].partition("\n")[0].split()
    explained = [line.split()[0] for line in make("help").stdout.splitlines() if line[:2] == "  "]
    assert set(verbs) <= set(explained)


def test_an_environment_without_the_pinned_packages_is_refused_with_one_message(
    tmp_path: Path,
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = make("recipes", f"PYTHON={bare}")
    assert done.returncode == 2
    assert "torch==2.14.1 is needed, not found" in done.stderr
    assert "leave PYTHON out" in done.stderr
