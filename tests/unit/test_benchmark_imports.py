"""Benchmarks that need several GPUs, or minutes, run rarely: at least they find what they use."""

import importlib
import pkgutil

import pytest

import tests.benchmarks

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(tests.benchmarks.__path__, "tests.benchmarks.")
    if not found.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_finds_what_it_uses(name: str) -> None:
    assert importlib.import_module(name).__doc__
