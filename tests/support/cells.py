"""Selects the cells of a matrix for the short suite: all other cells are marked `slow`."""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

slow = partial(pytest.param, marks=pytest.mark.slow)


def short_of(every: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Values of one argument. Values missing in `short` are marked slow."""
    return [value if value in short else slow(value) for value in every]


def short_rows(every: Iterable[tuple], short: Collection[tuple]) -> list[Any]:
    """Values of several arguments at once. Values missing in `short` are marked slow."""
    return [row if row in short else slow(*row) for row in every]


def mark_slow(items: list[pytest.Item], *, are_all: bool) -> None:
    """Marks cells slow unless `@pytest.mark.short_cells(id, …)` names them. Ids are the ones in the brackets of a test's name.

    Raises:
        pytest.UsageError: all tests were requested, and an id belongs to none of them.
    """
    unmet = set()
    met = set()
    for item in items:
        mark = item.get_closest_marker("short_cells")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        cell = item.name.partition("[")[2].removesuffix("]")
        unmet |= {(test, each) for each in mark.args}
        met.add((test, cell))
        if cell not in mark.args:
            item.add_marker(pytest.mark.slow)
    if are_all and unmet - met:
        raise pytest.UsageError(f"`short_cells` names what is no cell: {sorted(unmet - met)}")


def examples(count: int) -> settings:
    """Settings of a property with slow examples: `count` in the long suite, and a fifth in the short suite, at least five."""
    return settings(max_examples=max(5, count * settings().max_examples // 100), deadline=None)


EXTRA_OF = {"int8": "wire", "in blocks": "wire", "outer": "wire", "kernels": "kernels"}
"""Words in a cell's name → the extra needed by such a cell."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Marks the extras needed by a cell of this name."""
    return [pytest.mark.extra(folder) for word, folder in EXTRA_OF.items() if word in name]
