"""The ``launch:`` section of a recipe: how jobs are started on clusters."""

from dataclasses import dataclass, field

from launch.skypilot import SkyPilotSettings
from launch.slurm import SlurmSettings


@dataclass(kw_only=True, slots=True)
class LaunchSettings:
    """Settings of `make launch`; a local `make train` uses none of them."""

    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    skypilot: SkyPilotSettings = field(default_factory=SkyPilotSettings)
