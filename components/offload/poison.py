"""A way to make use after free visible: memory that nobody should read any more becomes NaN."""

import torch

_NAN = 0xFF
"""In every byte: NaN in bfloat16, float32 and float64."""


class Graves:
    """Memory whose last user is believed to be gone.

    It is overwritten as soon as that is so, on the current stream, which is where the allocator
    would have handed it out again. Meanwhile it is kept from being handed out: for tests.
    """

    def __init__(self) -> None:
        self._buried: list[torch.Tensor] = []

    def bury(self, memory: torch.Tensor) -> None:
        """Overwrite bytes (n,) once nothing else refers to their storage."""
        self._buried.append(memory)

    def sweep(self) -> int:
        """Overwrite what nothing else refers to; how many pieces of memory that was."""
        before = len(self._buried)
        self._buried = [memory for memory in self._buried if not _spoil_unused(memory)]
        return before - len(self._buried)


def spoil(memory: torch.Tensor) -> None:
    """Overwrite bytes (n,) with what is NaN in every floating-point format."""
    memory.fill_(_NAN)


def spoilt(nbytes: int, device: torch.device) -> torch.Tensor:
    """New memory of that kind: uint8 (nbytes,)."""
    return torch.full((nbytes,), _NAN, dtype=torch.uint8, device=device)


def _spoil_unused(memory: torch.Tensor) -> bool:
    storage = memory.untyped_storage()
    # The tensor and the line above.
    if torch._C._storage_Use_Count(storage._cdata) > 2:
        return False
    spoil(memory)
    return True
