"""The settings of an optimizer's group as JSON values, and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..checkpoint.faults import CheckpointError, shown

_OF_A_RUN = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "step"}
"""Settings added to the groups of any optimizer by schedulers and steps."""


def tell_apart(saved: Iterable[str], group: Iterable[str]) -> tuple[str, str] | None:
    """Returns a setting only the saved optimizer has and one only this run's has; None if both may be the same optimizer.

    Additional settings on one side only are accepted, because releases add settings and scripts store their own in groups.
    """
    there, here = set(saved) - _OF_A_RUN, set(group) - _OF_A_RUN - {"params", "param_names"}
    return (min(there - here), min(here - there)) if there - here and here - there else None


def restore_settings(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restores saved group settings (learning rate, betas, …). Lists become tuples if the group has tuples.

    Raises:
        CheckpointError: a setting's type does not fit the group's, for example a string instead of a number.
    """
    for key, value in saved.items():
        current = group.get(key)
        if not _is_alike(value, current):
            raise CheckpointError(
                f"hf_zero: the checkpoint has {shown(repr(value), 80)} for the setting {shown(key, 80)!r}, which is {current!r} "
                "here. It is damaged or belongs to another optimizer; resume from another checkpoint."
            )
        group[key] = _restored(value, current)


def _restored(value: Any, current: Any) -> Any:
    """Converts a saved setting to the form of the group's current value: tensor, number type, tuple or list."""
    if isinstance(current, torch.Tensor) and value is not None:
        # Fill the existing tensor, because a captured or compiled step refers to this object.
        return current.fill_(value)
    if isinstance(current, np.generic) and value is not None:
        return type(current)(value)
    if isinstance(current, tuple) and value is not None:
        return tuple(map(_restored, value, current))
    if isinstance(current, list) and value is not None:
        return list(map(_restored, value, current))
    return value


def _is_alike(value: Any, current: Any) -> bool:
    """Whether a saved setting can replace the group's. None on either side fits anything."""
    if value is None or current is None:
        return True
    if isinstance(current, np.generic):
        current = current.item()
    # Check bool before numbers, because a bool is an int, and a saved 0.9 would be accepted for a switch.
    if isinstance(current, bool | str) or torch.is_tensor(current):
        kind: Any = (bool, int, float) if torch.is_tensor(current) else type(current)
        return isinstance(value, kind) or torch.is_tensor(value)
    # A float may have become an int and vice versa. JSON integers have any size, but optimizers count in 64 bits.
    if isinstance(current, int | float):
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) or torch.is_tensor(value)
    if isinstance(current, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(current) and all(map(_is_alike, value, current))
    return True


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's settings, except its parameters, as JSON values.

    Raises:
        CheckpointError: a setting is not a JSON value, for example a function or a tensor of several numbers.
    """
    return {key: _plain(value, key) for key, value in group.items() if key not in ("params", "param_names")}


def _plain(value: Any, key: str) -> Any:
    # A learning rate may be a one-element tensor or a numpy number, which JSON does not support.
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
        f"hf_zero: the optimizer's setting {key!r} is a {what}, which cannot be saved; allowed: numbers, strings, booleans, "
        "None, and lists and dicts of these. Keep it outside of `param_groups` and `state_dict()`, or train without checkpoints."
    )


def same_groups(saved: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]) -> bool:
    """Whether the saved groups contain the same parameters as `names`."""
    return [set(group["parameters"]) for group in saved] == [set(group) for group in names]
