"""An optimizer group's settings as JSON values, and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .errors import CheckpointError
from .text import shown

_OF_A_RUN = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "step"}
"""Settings that schedulers, and steps, put into the groups of any optimizer."""


def tell_apart(saved: Iterable[str], group: Iterable[str]) -> tuple[str, str] | None:
    """A setting that only the saved one of two optimizers has, and one that only this run's has; None where one may be the other.

    It may where one of them alone has more: releases add settings, and scripts keep some of their own in groups.
    """
    there, here = set(saved) - _OF_A_RUN, set(group) - _OF_A_RUN - {"params", "param_names"}
    return (min(there - here), min(here - there)) if there - here and here - there else None


def restore_settings(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Puts saved group settings (learning rate, betas, …) back; lists become tuples where the group has tuples.

    Raises:
        CheckpointError: a setting is of another kind than the group's, such as a string where a number is due.
    """
    for key, value in saved.items():
        current = group.get(key)
        if not _is_alike(value, current):
            raise CheckpointError(
                f"hf_zero: the checkpoint has {shown(repr(value), 80)} for the setting {shown(key, 80)!r}, which is {current!r} "
                "here. It is damaged or of another optimizer; resume from another checkpoint."
            )
        group[key] = _restored(value, current)


def _restored(value: Any, current: Any) -> Any:
    """A saved setting as the group has it: in the same tensor, as the same kind of number, in the same kind of list."""
    if isinstance(current, torch.Tensor) and value is not None:
        return current.fill_(value)
    if isinstance(current, np.generic) and value is not None:
        return type(current)(value)
    if isinstance(current, tuple) and value is not None:
        return tuple(map(_restored, value, current))
    if isinstance(current, list) and value is not None:
        return list(map(_restored, value, current))
    return value


def _is_alike(value: Any, current: Any) -> bool:
    """Whether a saved setting can take the place of the group's; one that is None or unknown here may become anything."""
    if value is None or current is None:
        return True
    if isinstance(current, np.generic):
        current = current.item()
    if isinstance(current, bool | str) or torch.is_tensor(current):
        kind: Any = (bool, int, float) if torch.is_tensor(current) else type(current)
        return isinstance(value, kind) or torch.is_tensor(value)
    if isinstance(current, int | float):
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) or torch.is_tensor(value)
    if isinstance(current, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(current) and all(map(_is_alike, value, current))
    return True


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON values: everything but its parameters.

    Raises:
        CheckpointError: one is no such value, such as a function or a tensor of several numbers.
    """
    return {key: _plain(value, key) for key, value in group.items() if key not in ("params", "param_names")}


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, np.generic) or (torch.is_tensor(value) and value.numel() == 1):
        value = value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return [_plain(each, key) for each in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(each, key) for name, each in value.items()}
    what = f"tensor of {value.numel()} numbers" if torch.is_tensor(value) else type(value).__name__
    raise CheckpointError(
        f"hf_zero: the optimizer has a {what} as the setting {key!r} of a parameter group, and only numbers, strings, True, "
        "False, None, tensors of one number, and lists and dicts of these can be saved. Keep it outside of `param_groups`, or "
        "train without checkpoints."
    )


def same_groups(saved: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]) -> bool:
    """Whether the saved groups hold the same parameters as these."""
    return [set(group["parameters"]) for group in saved] == [set(group) for group in names]
