"""State in lists, tuples and dicts, as flat values with separate names."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..buckets.rows import NESTED, kind_of, name_of

PLAIN = (torch.Tensor, int, float, str, type(None))
"""Classes of state that can be copied and compared with the original."""
CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size", dict: "dict"}
"""Classes whose values are saved one by one. Objects of a subclass would be restored as another class."""

_KEYS = (str, int, float, bool, type(None))
"""Classes of dict keys that JSON restores unchanged."""

DUE = "delayed "
"""Prefix of keys in old checkpoints: gradients, settings and step counts of steps that were delayed by one."""


def _is_saved(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) in _KEYS for key in value) and all(map(_is_saved, value.values()))
    return all(map(_is_saved, value)) if kind in CONTAINERS else isinstance(value, PLAIN)


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state by kind, with the values of lists, tuples and dicts one by one.

    `GG = [a, [b]]` becomes `GG.0` = a and `GG.1.0` = b; `nested.GG` and `nested.GG.1` describe the lists. Containers of other
    objects stay whole, and all containers stay whole if two values would get the same name.
    """
    flat: dict[str, Any] = {}
    has_clash = False

    def put(name: str, value: Any) -> None:
        nonlocal has_clash
        kind = NESTED + name if _is_container(value) else kind_of(name)
        has_clash |= kind in flat
        if not _is_container(value):
            flat[kind] = value
            return
        keys = list(value) if type(value) is dict else len(value)
        flat[kind] = json.dumps([CONTAINERS[type(value)], keys])
        for number, each in enumerate(value.values() if type(value) is dict else value):
            put(f"{name}.{number}", each)

    for name, value in state.items():
        put(name, value)
    return {kind_of(name): value for name, value in state.items()} if has_clash else flat


def _is_container(value: Any) -> bool:
    # Other containers stay unchanged, and are refused by a save.
    return type(value) in CONTAINERS and _is_saved(value)


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Restores the state from the result of `flat_state`.

    Raises:
        ValueError: a value of a list, tuple or dict is missing, or its description is invalid.
    """
    left = dict(flat)

    def build(name: str) -> Any:
        description = left.pop(NESTED + name, None)
        if description is None:
            return left.pop(kind_of(name))
        container, keys = json.loads(description)
        count = keys if isinstance(keys, int) else len(keys)
        # Build one value after the other, so a damaged count ends at the first missing value.
        values = [build(f"{name}.{number}") for number in range(count)]
        if container == "dict":
            return dict(zip(keys, values, strict=True))
        return next(kind for kind, word in CONTAINERS.items() if word == container)(values)

    state = {}
    try:
        # Build outer containers first: their names are shorter, and building them consumes the inner ones.
        for kind in sorted((kind for kind in flat if kind.startswith(NESTED)), key=len):
            if kind in left:
                name = kind.removeprefix(NESTED)
                state[name] = build(name)
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError) as error:
        raise ValueError(
            f"hf_zero: the optimizer state in lists, tuples or dicts is damaged ({type(error).__name__}: {error}). Resume from "
            "another checkpoint."
        ) from error
    return {name_of(kind): value for kind, value in left.items()} | state


def with_each(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the state with each value changed, also inside lists, tuples and dicts."""
    return nested_state(
        {kind: value if kind.startswith(NESTED) else change(value) for kind, value in flat_state(state).items()}
    )
