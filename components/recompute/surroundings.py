"""What a computation depends on besides its arguments: random numbers and autocast."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class RandomState:
    """The generators of the CPU and of one device."""

    device: torch.device
    cpu_state: torch.Tensor
    device_state: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """Read them."""
        state = None if device.type in ("cpu", "meta") else _module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), state)

    def restore(self) -> None:
        """Set them back to what they were."""
        torch.set_rng_state(self.cpu_state)
        if self.device_state is not None:
            _module(self.device).set_rng_state(self.device_state, self.device)

    def has_moved(self) -> bool:
        """Whether a number has been drawn since."""
        now = RandomState.now(self.device)
        if not torch.equal(now.cpu_state, self.cpu_state):
            return True
        mine, current = self.device_state, now.device_state
        return mine is not None and current is not None and not torch.equal(mine, current)


@dataclass(frozen=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> "_Autocast":
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )

    def again(self) -> torch.amp.autocast:
        # No cache: a cast made here may have no graph, and somebody else would get it.
        return torch.amp.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


class Surroundings:
    """What surrounds a first run, for running again in backward, where it is something else."""

    def __init__(self, device: torch.device, preserve_rng_state: bool) -> None:
        """Note what is set now.

        Args:
            device: whose generator and autocast matter, besides the CPU's.
            preserve_rng_state: whether random numbers are drawn again as they were.
        """
        self._device = device
        self._random = RandomState.now(device) if preserve_rng_state else None
        types = {"cpu", device.type} - {"meta"}
        self._autocasts = [_Autocast.now(type_) for type_ in sorted(types)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run under them; afterwards everything is as before."""
        with ExitStack() as stack:
            for each in self._autocasts:
                stack.enter_context(each.again())
            if self._random is not None:
                stack.callback(RandomState.now(self._device).restore)
                self._random.restore()
            yield


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
