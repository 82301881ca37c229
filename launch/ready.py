"""A recipe that passed every check, and the device and ranks it was checked for."""

from pathlib import Path
from typing import TYPE_CHECKING

from components.core.problems import Problem, RecipeError
from components.titan.device import use_device
from launch import garbage
from launch.config.compose import Composed, compose

if TYPE_CHECKING:
    from components.core.recipe import Recipe


class Ready:
    """A recipe that passed every check, and where it will run."""

    def __init__(
        self, path: Path, overrides: list[str], ngpu: int | None, anywhere: bool = False
    ) -> None:
        """Load and check.

        Args:
            anywhere: judge a recipe written for other hardware than this machine's.
        """
        self.composed = compose(path, overrides)
        with garbage.none_while_importing():
            self.device = _device(self.composed, anywhere)
            from components.core.base import Target
            from launch import local
            from launch.config.checks import check_recipe
            from launch.config.load import bind_recipe

        self.recipe = bind_recipe(self.composed.data, self.composed.origins)
        hardware = self.recipe.hardware
        if anywhere and ngpu is None and hardware.ranks != "auto":
            self.ranks = int(hardware.ranks)
        else:
            self.ranks = local.rank_count(hardware, self.device, ngpu)
        device = hardware.device if anywhere and hardware.device != "auto" else self.device
        check_recipe(self.recipe, self.ranks, device, self.composed.origins)
        _settle_batch(self.recipe, self.ranks)
        self.target = Target(device, self.ranks, hardware.memory)


def _device(composed: Composed, anywhere: bool) -> str:
    wanted = composed.data.get("hardware", {}).get("device", "auto")
    if anywhere:
        wanted = "auto"
    if wanted not in ("auto", "cpu", "cuda"):
        # Reported properly by the binder; any device will do until then.
        wanted = "auto"
    try:
        return use_device(wanted)
    except ValueError as error:
        raise RecipeError([Problem("", str(error))]) from error


def _settle_batch(recipe: "Recipe", ranks: int) -> None:
    """Write the batch that "no accumulation" means down as a number.

    A run continued or replayed on other ranks then keeps its batch, by accumulation, or is refused.
    """
    # Imported here: torchtitan settles its device when it is imported.
    from components.titan.batch import sequences_per_step

    recipe.training.global_batch_size = sequences_per_step(recipe, ranks)
