"""Host memory that tensors lie in: it is no device memory, even where the device is the CPU."""

import gc

from components.offload.slabs import Slab
from components.titan.memory.storages import storage_key


def host_storages() -> frozenset[int]:
    """Keys of the storages of all slabs in this process; valid as long as the slabs live."""
    slabs = [value for value in gc.get_objects() if issubclass(type(value), Slab)]
    return frozenset(storage_key(slab.view(0, 0)) for slab in slabs)
