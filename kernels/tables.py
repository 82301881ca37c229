"""Tables that follow from lengths of documents, made once for all layers and passes that need them.

They outlive the pass that they were made in. They are no leak: a function remembers a fixed number
of them, and what it made for a batch goes when later ones have come.
"""

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch

_Table = TypeVar("_Table")
_LOCAL = threading.local()


def remembered(most: int) -> Callable[[Callable[..., _Table]], Callable[..., _Table]]:
    """Remember what a function returned for its latest arguments, which must be hashable.

    Whether inference mode is on is one of them: autograd cannot save a tensor that was made in it.

    Args:
        most: results kept at a time.
    """

    def remember(make: Callable[..., _Table]) -> Callable[..., _Table]:
        @lru_cache(maxsize=most)
        def made(inference: bool, *args: object) -> _Table:
            outer, _LOCAL.making = being_made(), True
            try:
                return make(*args)
            finally:
                _LOCAL.making = outer

        @wraps(make)
        def call(*args: object) -> _Table:
            return made(torch.is_inference_mode_enabled(), *args)

        return call

    return remember


def being_made() -> bool:
    """Whether this thread is making a table at the moment."""
    return getattr(_LOCAL, "making", False)
