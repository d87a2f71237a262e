"""Which cells of a matrix are in the short suite: the others are marked `slow`, and lose nothing but their hurry."""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

slow = partial(pytest.param, marks=pytest.mark.slow)


def short_of(every: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Values of one argument, of which those that are not in `short` are slow."""
    return [value if value in short else slow(value) for value in every]


def short_rows(every: Iterable[tuple], short: Collection[tuple]) -> list[Any]:
    """Values of several arguments at once, of which those that are not in `short` are slow."""
    return [row if row in short else slow(*row) for row in every]


def mark_slow(items: list[pytest.Item], *, are_all: bool) -> None:
    """Marks what `@pytest.mark.short_cells(id, …)` does not name: ids are those in the brackets of a test's name.

    Raises:
        pytest.UsageError: all tests were asked for, and one of the ids is of none.
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
    """Of a property whose examples take long: `count` in the long run, and a fifth of them in the short one, five at least."""
    return settings(max_examples=max(5, count * settings().max_examples // 100), deadline=None)


EXTRA_OF = {"int8": "wire", "in blocks": "wire", "outer": "wire", "early": "early", "kernels": "kernels"}
"""Words of a cell's name, and the extra that such a cell needs."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """The extras that a cell of this name needs."""
    return [pytest.mark.extra(folder) for word, folder in EXTRA_OF.items() if word in name]
