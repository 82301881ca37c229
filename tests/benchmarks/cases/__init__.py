"""The benchmark cases: one module each, defining ``CASE``."""

import importlib
import pkgutil

from tests.benchmarks.case import Case
from tests.benchmarks.usage import choose


def names() -> list[str]:
    """Names of all cases, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Case:
    """Import one case.

    Raises:
        UsageError: there is no such case.
    """
    module = importlib.import_module(f"{__name__}.{choose(name, names(), 'NAME')}")
    case: Case = module.CASE
    return case
