"""`make launch`: what is refused, and that nothing is left behind then."""

from pathlib import Path

import pytest

from components.core.problems import RecipeError
from launch.cluster import launch
from tests.unit.config_support import STEADY, write_recipe


def refused(tmp_path: Path, on: str = "slurm", dry: bool = False, **given: object) -> list[str]:
    recipe = write_recipe(tmp_path, STEADY)
    counts = {"nodes": None, "ngpu": None, "overrides": []} | given
    overrides = [f"output_dir={tmp_path}/out", *counts["overrides"]]  # type: ignore[misc]
    with pytest.raises(RecipeError) as refusal:
        launch(recipe, overrides, on, counts["nodes"], counts["ngpu"], dry)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    return [problem.path for problem in refusal.value.problems]


TWO = ["hardware.ranks=2", "hardware.ranks_per_node=1", "training.local_batch_size=1"]


@pytest.mark.parametrize("dry", [True, False])
def test_a_job_that_cannot_be_written_leaves_no_run_directory(tmp_path: Path, dry: bool) -> None:
    found = refused(tmp_path, "skypilot", dry, overrides=TWO)
    assert found == ["launch.skypilot.storage"]


@pytest.mark.parametrize("on", ["slurm", "skypilot"])
def test_numbers_of_machines_below_one_are_named_as_on_the_command_line(
    tmp_path: Path, on: str
) -> None:
    assert refused(tmp_path, on, nodes=0) == ["NODES"]
    assert refused(tmp_path, on, ngpu=0) == ["NGPU"]
    assert refused(tmp_path, on, nodes=-1, ngpu=-1) == ["NODES", "NGPU"]


def test_machines_that_the_ranks_do_not_fill_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, nodes=3) == ["hardware.ranks"]


def test_a_dry_run_prints_the_job_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, STEADY)
    overrides = [f"output_dir={tmp_path}/out", *TWO]
    assert launch(recipe, overrides, "slurm", None, None, True) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in printed
    assert "#SBATCH --gpus-per-node=1\n" in printed
    assert not (tmp_path / "out").exists()
