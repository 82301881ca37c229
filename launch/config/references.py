"""Values that refer to others (``${section.key}``) or are still missing (``???``)."""

import re
from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from components.core.problems import Problem, RecipeError, nearest
from launch.config.origins import place_of

_FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\b")


def resolve(config: DictConfig, origins: dict[str, str], unset: list[str]) -> dict[str, Any]:
    """Follow every ``${...}`` and return plain data.

    Args:
        config: composed.
        origins: dotted key -> where it was set.
        unset: keys whose last file says ``???``. OmegaConf keeps what an earlier file set.

    Raises:
        RecipeError: all keys that are ``???`` or refer to what cannot be found.
    """
    problems = list(_open_values(config, "", origins))
    found = {problem.path for problem in problems}
    problems += [_missing(key, origins) for key in unset if key not in found]
    if problems:
        raise RecipeError(problems)
    data = OmegaConf.to_container(config, resolve=True)
    return cast(dict[str, Any], data)


def _open_values(node: Any, prefix: str, origins: dict[str, str]) -> Iterator[Problem]:
    """Values that are missing, or refer to what cannot be found."""
    keys = range(len(node)) if OmegaConf.is_list(node) else list(node)
    for key in keys:
        path = f"{prefix}[{key}]" if OmegaConf.is_list(node) else f"{prefix}.{key}".lstrip(".")
        where = place_of(origins, path)
        if OmegaConf.is_missing(node, key):
            yield _missing(path, origins)
            continue
        if OmegaConf.is_interpolation(node, key) and _reads_environment(node, key):
            yield _environment(path, where)
            continue
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            message, hint = _reference_problem(error, origins)
            yield Problem(path, message, hint, where)
            continue
        if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, key):
            yield from _open_values(value, path, origins)


def _reads_environment(node: Any, key: Any) -> bool:
    written = cast(Any, OmegaConf.to_container(node, resolve=False))[key]
    return _FROM_ENVIRONMENT.search(str(written)) is not None


def _environment(path: str, where: str) -> Problem:
    message = "settings do not come from the environment here, so ${oc.env:...} is not followed"
    hint = f"write the value, or pass it on the command line: {path}=VALUE"
    return Problem(path, message, hint, where)


def _missing(path: str, origins: dict[str, str]) -> Problem:
    return Problem(path, "has no value yet ('???'); set it", where=place_of(origins, path))


def _reference_problem(error: OmegaConfBaseException, origins: dict[str, str]) -> tuple[str, str]:
    text = str(error).splitlines()[0]
    quoted = text.split("'")[1] if text.count("'") >= 2 else text
    if isinstance(error, InterpolationKeyError):
        message = f"refers to ${{{quoted}}}, which neither the recipe nor conf/ sets"
        near = nearest(quoted, origins, cutoff=0.75)
        return message, f"did you mean {' or '.join(near)}?" if near else ""
    if isinstance(error, UnsupportedInterpolationType):
        name = text.rpartition(" ")[2]
        message = f"${{{name}:...}} is no function; refer to a key as ${{section.key}}"
        return message, ""
    if "Recursive" in text:
        return "refers to itself", "follow its ${...} references to the one that closes the circle"
    return f"cannot be resolved: {text}", ""
