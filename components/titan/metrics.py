"""What a run reports: one line per step, a progress bar, TensorBoard scalars, metrics.jsonl.

``GLOSSARY`` is the list of scalar names; a test keeps it equal to what is written.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from tqdm import tqdm

from components.titan.device import peak_resident_bytes, reset_peak_resident_bytes
from components.titan.story import narrate

GLOSSARY = {
    "train/loss": "mean cross entropy over all valid tokens of the step, nats per token",
    "train/loss_max_rank": "largest mean loss of a single rank, nats per token",
    "train/grad_norm": "global L2 norm of the gradient before clipping",
    "train/lr": "learning rate used for the step",
    "train/tokens_seen": "tokens read since the run began, all ranks",
    "speed/tokens_per_second_per_device": "tokens per second and device since the last line",
    "speed/step_seconds": "mean wall time of a step since the last line, seconds",
    "speed/data_wait_seconds": "mean time per step spent waiting for data, seconds",
    "speed/tflops_per_device": "model FLOPs per second and device, without recomputation, 1e12",
    "speed/mfu_percent": "tflops_per_device over the GPU's peak bf16 rate, percent; GPUs only",
    "memory/peak_active_gib": "peak memory in use since the last line, GiB",
    "memory/peak_reserved_gib": "peak memory held by the allocator since the last line, GiB",
    "memory/host_peak_gib": "peak resident host memory of the process since the last line, GiB",
    "memory/alloc_retries": "times the allocator had to free its cache to go on",
    "validation/loss": "mean cross entropy over the held-out split, nats per token",
    "moe/max_over_mean_load": "busiest expert's tokens over the mean, worst layer",
    "moe/idle_experts": "share of all layers' experts that no token of the step visited",
}

_GIB = 2**30


class RunMetrics(MetricsProcessor):
    """torchtitan's metrics processor with our line, our names and components' own scalars."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        log_freq: int = 1
        """Steps between two lines (and TensorBoard points)."""

        enable_tensorboard: bool = True
        """Whether to write TensorBoard scalars into the run directory."""

        progress_bar: bool = True
        """Show a live bar below the lines when standard error is a terminal."""

        expert_load: bool = False
        """Whether to write every expert's tokens of each logged step to expert_load.jsonl in the
        run directory, by layer: about 7 bytes per expert, layer and line."""

        def __post_init__(self) -> None:
            if self.log_freq < 1:
                raise ValueError(f"log_freq is {self.log_freq}; it must be at least 1")

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.total_steps = 0
        self.glossary = dict(GLOSSARY)
        self.headlines: dict[str, str] = {}
        self.sources: list[Callable[[], dict[str, float]]] = []
        self.largest_loss: Callable[[], float] | None = None
        self._steps_since_last_log = 0
        self._started_at: tuple[int, float] | None = None
        self._bar: tqdm | None = None
        self._file = Path(kwargs["dump_folder"]) / "metrics.jsonl" if _is_first_rank() else None

    def should_log(self, step: int) -> bool:
        self._steps_since_last_log += 1
        return step == self.total_steps or super().should_log(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report one step; called on every rank, printed on the first.

        Args:
            step: 1-based step number.
            global_avg_loss: nats per token over all ranks.
            global_max_loss: largest per-rank mean, nats per token.
            grad_norm: before clipping.
            extra_metrics: the trainer's learning rates and token count.
        """
        extra = dict(extra_metrics or {})
        rates = [value for name, value in extra.items() if name.startswith("lr")]
        scalars = {
            "train/loss": global_avg_loss,
            "train/loss_max_rank": self.largest_loss() if self.largest_loss else global_max_loss,
            "train/grad_norm": grad_norm,
            "train/lr": rates[0] if rates else 0.0,
            "train/tokens_seen": extra.get("n_tokens_seen", 0),
            **self._speed(),
            **self._memory(),
        }
        for source in self.sources:
            scalars.update(source())
        undescribed = scalars.keys() - self.glossary.keys()
        if undescribed:
            raise ValueError(f"scalars without a line in a glossary: {sorted(undescribed)}")
        self._record(step, scalars)
        narrate(self._line(step, scalars))
        self._advance_bar(step)
        self._start_interval()

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Report the loss on the held-out split, nats per token."""
        self._record(step, {"validation/loss": loss, **(extra_metrics or {})})
        narrate(f"step {step}/{self.total_steps} | validation loss {loss:.4f}")
        self._start_interval()

    def record_expert_load(self, step: int, totals: dict[str, list[int]]) -> None:
        """Append a step's tokens per expert, layer by layer, if that is wanted."""
        if self.config.expert_load and totals and self._file is not None:
            with self._file.with_name("expert_load.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, **totals}) + "\n")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        super().close()

    def _record(self, step: int, scalars: dict[str, float]) -> None:
        """To TensorBoard (rounded to fp32 there) and, in full precision, to metrics.jsonl."""
        self.logger.log(scalars, step)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps({"step": step, **scalars}) + "\n")

    def _speed(self) -> dict[str, float]:
        elapsed = time.perf_counter() - self.time_last_log
        steps = max(self._steps_since_last_log, 1)
        rate = self.ntokens_since_last_log / (elapsed * self.parallel_dims.non_data_parallel_size)
        flops = self.num_flops_per_token * rate
        speed = {
            "speed/tokens_per_second_per_device": rate,
            "speed/step_seconds": elapsed / steps,
            "speed/data_wait_seconds": sum(self.data_loading_times) / steps,
            "speed/tflops_per_device": flops / 1e12,
        }
        # A CPU has no peak rate that torchtitan knows; a share of some GPU's would mislead.
        if self.device_memory_monitor.device.type != "cpu":
            speed["speed/mfu_percent"] = 100 * flops / self.gpu_peak_flops
        return speed

    def _memory(self) -> dict[str, float]:
        stats = self.device_memory_monitor.get_peak_stats()
        return {
            "memory/peak_active_gib": stats.max_active_gib,
            "memory/peak_reserved_gib": stats.max_reserved_gib,
            "memory/host_peak_gib": peak_resident_bytes() / _GIB,
            "memory/alloc_retries": stats.num_alloc_retries,
        }

    def _line(self, step: int, scalars: dict[str, float]) -> str:
        peak = scalars["memory/peak_reserved_gib"]
        share = 100 * peak / self.device_memory_monitor.device_capacity_gib
        parts = [
            f"step {step}/{self.total_steps}",
            f"loss {scalars['train/loss']:.4f}",
            f"grad {scalars['train/grad_norm']:.3f}",
            f"lr {scalars['train/lr']:.2e}",
            f"{scalars['speed/tokens_per_second_per_device']:,.0f} tok/s/device",
            f"peak {peak:.2f} GiB ({share:.0f}%)",
            f"data {1000 * scalars['speed/data_wait_seconds']:.0f} ms",
        ]
        if "moe/max_over_mean_load" in scalars:
            parts.append(f"expert load {scalars['moe/max_over_mean_load']:.1f}x")
        for name, label in self.headlines.items():
            if name in scalars:
                parts.append(f"{label} {scalars[name]:.3g}")
        parts.append(f"eta {self._eta(step)}")
        return " | ".join(parts)

    def _eta(self, step: int) -> str:
        """Time to the last step at the pace since the first line; the first step is not a pace."""
        now = time.perf_counter()
        if self._started_at is None:
            self._started_at = (step, now)
            return "--:--"
        first, began = self._started_at
        remaining = (self.total_steps - step) * (now - began) / max(step - first, 1)
        minutes, seconds = divmod(round(remaining), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

    def _advance_bar(self, step: int) -> None:
        if self._bar is None:
            shown = self.config.progress_bar and sys.stderr.isatty() and _is_first_rank()
            self._bar = tqdm(
                total=self.total_steps,
                initial=step - 1,
                unit="step",
                disable=not shown,
                leave=False,
            )
        self._bar.update(step - self._bar.n)

    def _start_interval(self) -> None:
        self.ntokens_since_last_log = 0
        self._steps_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()
        reset_peak_resident_bytes()


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0
