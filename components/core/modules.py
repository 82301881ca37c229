"""Find a model's modules."""

from collections.abc import Iterable
from typing import TypeVar

import torch.nn as nn

Kind = TypeVar("Kind", bound=nn.Module)


def modules_of(parts: Iterable[nn.Module], kind: type[Kind]) -> list[Kind]:
    """Every module of a kind, subclasses included, in the order of the parts.

    Args:
        parts: of a model, such as ``trainer.model_parts``.
    """
    return [module for part in parts for module in part.modules() if isinstance(module, kind)]
