"""Every test runs torchtitan on the CPU unless it is marked ``gpu``."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    import torch

    from components.titan.device import use_device

    wants_gpu = "gpu" in (config.option.markexpr or "") and "not gpu" not in config.option.markexpr
    use_device("auto" if wants_gpu else "cpu")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a fixture run on one worker (`--dist loadgroup`): many of those fixtures
    train for half a minute, and each worker would make its own."""
    for item in items:
        if isinstance(item, pytest.Function) and (shared := _shared_fixtures(item)):
            item.add_marker(pytest.mark.xdist_group(f"{item.nodeid.split('::')[0]}: {shared}"))


def _shared_fixtures(item: pytest.Function) -> str:
    """The fixtures of its module that a test uses, and which of their parameters; "" if none."""
    parameters = item.callspec.indices if hasattr(item, "callspec") else {}
    return ", ".join(
        f"{name} {parameters.get(name, '')}".strip()
        for name, found in sorted(item._fixtureinfo.name2fixturedefs.items())
        if found[-1].scope == "module"
    )
