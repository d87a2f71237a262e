"""Checks a manifest's JSON values against the format before anything relies on them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from .headers import is_shape, is_size

Value = TypeVar("Value")


class FieldError(ValueError):
    """A value of another kind than the format says; names the field."""


def mapping(value: Any, what: str, of: Callable[[Any, str], Value]) -> dict[str, Value]:
    """Checks a mapping, and each value with `of`."""
    if not isinstance(value, dict):
        raise _other(value, what, "a mapping")
    return {name: of(each, f"{what} of {name[:200]!r}") for name, each in value.items()}


def listing(value: Any, what: str, of: Callable[[Any, str], Value]) -> tuple[Value, ...]:
    """Checks a list, and each value with `of`."""
    if not isinstance(value, list):
        raise _other(value, what, "a list")
    return tuple(of(each, f"{what}[{number}]") for number, each in enumerate(value))


def fields(value: Any, what: str, names: set[str]) -> dict[str, Any]:
    """A mapping that has these names and no others."""
    if not isinstance(value, dict) or value.keys() != names:
        raise _other(value, what, f"a mapping of {', '.join(sorted(names))}")
    return value


def items(value: Any, what: str, count: int) -> list[Any]:
    """A list of so many values."""
    if not isinstance(value, list) or len(value) != count:
        raise _other(value, what, f"a list of {count}")
    return value


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _other(value, what, "a string")
    return value


def optional_text(value: Any, what: str) -> str | None:
    return None if value is None else text(value, what)


def truth(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise _other(value, what, "true or false")
    return value


def size(value: Any, what: str) -> int:
    """A whole number from 0 on that torch can count."""
    if not is_size(value):
        raise _other(value, what, "a whole number from 0 to 2**63")
    return value


def optional_size(value: Any, what: str) -> int | None:
    return None if value is None else size(value, what)


def shape(value: Any, what: str) -> tuple[int, ...]:
    if not is_shape(value):
        raise _other(value, what, "a list of sizes")
    return tuple(value)


def scalar(value: Any, what: str) -> Any:
    """A state of a whole parameter: a number, a string, a boolean, None, or a tensor as `{"dtype", "value"}`."""
    if isinstance(value, dict):
        held = fields(value, what, {"dtype", "value"})
        dtype = getattr(torch, text(held["dtype"], f"{what}.dtype"), None)
        if not isinstance(dtype, torch.dtype):
            raise _other(held["dtype"], f"{what}.dtype", "the name of a dtype")
        number = held["value"]
        is_held = (
            dtype.is_floating_point if isinstance(number, float) else isinstance(number, int) and abs(number) < 2**63
        )
        if not is_held:
            raise _other(number, f"{what}.value", f"a number that a tensor of {dtype} can hold")
        return value
    if not isinstance(value, bool | int | float | str | None):
        raise _other(value, what, "a number, a string, true, false or null")
    return value


def optimizer(value: Any, what: str) -> dict[str, Any]:
    """A class name, and groups of settings and parameters' names."""
    held = fields(value, what, {"class", "groups"})
    text(held["class"], f"{what}.class")
    listing(held["groups"], f"{what}.groups", _group)
    return held


def refuse_unknown(known: Mapping[str, Any], names: Mapping[str, Any], what: str) -> None:
    """Raises unless all names are known ones."""
    for name in names:
        if name not in known:
            raise FieldError(f"{what} has {name[:200]!r}, which no parameter is called")


def refuse_mixed(scalars: Mapping[str, Mapping[str, Any]], what: str) -> None:
    """Raises where one state of a group's parameters is a tensor for some and a plain value for others.

    torch steps a group's parameters together, and fails of such a mixture in the midst of a step.
    """
    form: dict[str, tuple[bool, str]] = {}
    for name, values in scalars.items():
        for key, value in values.items():
            if value is None:
                continue
            is_tensor = isinstance(value, dict)
            was_tensor, other = form.setdefault(key, (is_tensor, name))
            if is_tensor != was_tensor:
                raise FieldError(
                    f"{what} has {key[:80]!r} as a tensor for one of {other[:200]!r} and {name[:200]!r}, and plain for the other"
                )


def refuse_beyond(start: int, stop: int, whole: tuple[int, ...], what: str) -> None:
    """Raises unless elements `start` to `stop` are some of a tensor of shape `whole`."""
    if not start <= stop <= math.prod(whole):
        raise FieldError(f"{what} has elements {start} to {stop} of {math.prod(whole)}")


def _group(value: Any, what: str) -> dict[str, Any]:
    held = fields(value, what, {"settings", "parameters"})
    if not isinstance(held["settings"], dict):
        raise _other(held["settings"], f"{what}.settings", "a mapping")
    listing(held["parameters"], f"{what}.parameters", text)
    return held


def _other(value: Any, what: str, due: str) -> FieldError:
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return FieldError(f"{what} is {shown[:80]}{'…' if len(shown) > 80 else ''}, where {due} is due")
