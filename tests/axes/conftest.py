"""Models that transformers splits over ranks: older releases of it than `parallel_config` takes have their tests skipped."""

import importlib.metadata

import pytest
from packaging.version import Version


@pytest.fixture(scope="session", autouse=True)
def _newer_transformers() -> None:
    installed = importlib.metadata.version("transformers")
    if Version(installed) < Version("5.23"):
        pytest.skip(f"transformers {installed} splits no models over ranks as the engine takes them: 5.23 does")
