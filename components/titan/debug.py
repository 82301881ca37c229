"""The ``debug:`` section of a recipe: torchtitan's switches and this project's own."""

from dataclasses import dataclass

from torchtitan.config.configs import DebugConfig

from components.core.units import Count
from components.expert_dispatch.profiles import RoutingProfile


@dataclass(kw_only=True, slots=True)
class DebugSettings(DebugConfig):
    leak_guard: bool = False
    """Whether a layer's activation that outlives its backward, or its micro-batch, ends the run
    with an error that names what holds it. For debugging: a step takes two to four times as long.
    """

    memory_timeline: Count | None = None
    """Step whose device memory is drawn into memory_timeline.png and .html in the run directory,
    by category and phase, on the first rank; null: none. That step runs slower. `make memory` sets
    it."""

    routing_profile: str | None = None
    """Which experts tokens visit, whatever the router computes: "80/16" sends the first 80 percent
    of each rank's tokens to 16 hot experts and spreads the rest over the others; "balanced" spreads
    all of them; null: the router decides. For measuring what imbalance costs, not for training."""

    @property
    def profile(self) -> RoutingProfile | None:
        """``routing_profile``, read."""
        return None if self.routing_profile is None else RoutingProfile.parse(self.routing_profile)

    def __post_init__(self) -> None:
        if self.routing_profile is not None:
            RoutingProfile.parse(self.routing_profile)
        if self.memory_timeline is not None and self.memory_timeline < 1:
            raise ValueError(
                f"memory_timeline is {self.memory_timeline}; steps count from 1 (null: no timeline)"
            )
