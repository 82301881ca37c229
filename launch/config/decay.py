"""Whether every pattern of parameters without weight decay means something."""

import re
from collections.abc import Iterator

import torch
from torchtitan.protocols.model import BaseModel

from components.core.problems import Problem
from components.core.recipe import Recipe


def check_decay_patterns(recipe: Recipe, model: BaseModel.Config) -> Iterator[Problem]:
    """Problems of ``optimizer.no_decay``; torchtitan would find them once the model is built.

    Args:
        recipe: passed every other check.
        model: the config tree with all components applied. Built here, without memory.
    """
    patterns = recipe.optimizer.no_decay
    if not patterns:
        return
    free = _trained_names(model)
    for index, pattern in enumerate(patterns):
        key = f"optimizer.no_decay[{index}]"
        try:
            regex = re.compile(pattern)
        except re.error as error:
            yield Problem(key, f"{pattern!r} is no regular expression: {error}")
            continue
        matched = {name for name in free if regex.search(name)}
        if not matched:
            message = f"{pattern!r} matches no trained parameter that an earlier pattern leaves"
            example = f"; names are such as {free[0]}" if free else ""
            yield Problem(key, message, f"leave it out, or correct it{example}")
        free = [name for name in free if name not in matched]


def _trained_names(config: BaseModel.Config) -> list[str]:
    with torch.device("meta"):
        model = config.build()
    # Models that train a part of themselves say which when they are parallelised.
    freeze = getattr(model, "freeze", None)
    if freeze is not None:
        freeze()
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
