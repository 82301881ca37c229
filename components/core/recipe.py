"""A recipe, typed: everything one training run is."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.tools.profiler import Profiler

from components.core.registry import settings_class
from components.core.units import Bytes, Count
from components.models.settings import ModelSettings
from components.titan.checkpoint import RunCheckpoints
from components.titan.debug import DebugSettings
from components.titan.metrics import RunMetrics
from components.titan.optimizer import AdamWSettings
from data.corpus import CorpusSettings
from launch.settings import LaunchSettings


@dataclass(kw_only=True, slots=True)
class Hardware:
    """The machines a recipe is written for."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live. auto: cuda if torch sees a CUDA device, else cpu."""

    ranks: int | Literal["auto"] = "auto"
    """Processes in the job, one per device. auto: all visible CUDA devices, or 1 on a CPU."""

    ranks_per_node: int = 8
    """Devices in one machine; used to size multi-node jobs."""

    name: str = "any"
    """What to book, for people: "h200", "b200", "any"."""

    memory: Bytes | None = None
    """Memory of one device, for `make check`; null: not compared with anything."""

    host_memory: Bytes | None = None
    """Main memory of one machine, for what its ranks keep there; null: not compared before a run
    starts on the machine itself."""

    expandable_segments: bool = True
    """On CUDA: whether the allocator's segments grow, so that less memory is reserved beyond what
    tensors take. false: as PYTORCH_ALLOC_CONF says; torch's own default is that they do not."""

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}; it must be at least 1")


@dataclass(kw_only=True, slots=True)
class Validation:
    """Loss on the held-out documents while training."""

    enabled: bool = False
    """Whether to validate."""

    every: Count = 100
    """Steps between two validations; the first step is always validated."""

    batches: int = -1
    """Batches per data-parallel rank and validation; -1: the whole held-out split."""


@dataclass(kw_only=True, slots=True)
class Recipe:
    """One training run. Sections named after torchtitan's are its own config classes."""

    description: str = ""
    """One line for `make recipes`."""

    hardware: Hardware = field(default_factory=Hardware)
    model: ModelSettings
    data: CorpusSettings
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: AdamWSettings = field(default_factory=AdamWSettings)
    lr_scheduler: LRSchedulersContainer.Config = field(default_factory=LRSchedulersContainer.Config)
    components: Any = field(default_factory=lambda: settings_class()())
    checkpoint: RunCheckpoints.Config = field(default_factory=RunCheckpoints.Config)
    validation: Validation = field(default_factory=Validation)
    metrics: RunMetrics.Config = field(default_factory=RunMetrics.Config)
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    profiler: Profiler.Config = field(default_factory=Profiler.Config)
    debug: DebugSettings = field(default_factory=DebugSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)

    output_dir: str = "outputs"
    """Folder that holds the run directories."""
