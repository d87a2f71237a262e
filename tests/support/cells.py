"""Which cells of a matrix are in the short suite: the others are marked `slow`, and lose nothing but their hurry."""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)


def short_of(every: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which those that are not in `short` are slow."""
    return [value if value in short else slow(value) for value in every]
