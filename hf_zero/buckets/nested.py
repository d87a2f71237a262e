"""Tensors inside the nested arguments of a torch function."""

from collections.abc import Iterator
from typing import Any


def leaves(value: Any) -> Iterator[Any]:
    """All that a nest of lists, tuples and dicts holds."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value
