"""Models that transformers splits over ranks."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _splits_models(splits_models: None) -> None:
    """For all tests here."""
