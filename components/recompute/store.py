"""Where recomputation keeps tensors between forward and backward."""

from collections.abc import Callable
from typing import Protocol

import torch

Recall = Callable[[], torch.Tensor]


class Store(Protocol):
    """Set ``RecomputedLayer.store`` to keep tensors elsewhere than on the device.

    Both methods are called in forward order. What they return is called in backward: boundaries
    once, last first; what layers hold, in forward order within a layer each time it runs again,
    which is once more where its segment's inputs are rebuilt. Neither is called for what no
    gradient needs. The tensor may be freed as soon as nothing else holds it, and its place as soon
    as the returned function is gone (the graph holds it; an error may drop it unused).
    """

    def boundary(self, tensor: torch.Tensor) -> Recall:
        """Keep the input of a layer, or of a segment's first layer.

        Args:
            tensor: as the layer received it: it may be a view, a parameter, or share its memory.

        Returns:
            What gives its values back, without a graph, on its device.
        """
        ...

    def hold(self, tensor: torch.Tensor) -> Recall:
        """Keep what a layer computed (detached); see ``boundary``."""
        ...


class OnDevice:
    """The store that leaves everything where it is."""

    def boundary(self, tensor: torch.Tensor) -> Recall:
        """See ``Store.boundary``."""
        return self.hold(tensor.detach())

    def hold(self, tensor: torch.Tensor) -> Recall:
        """See ``Store.hold``."""
        return lambda: tensor
