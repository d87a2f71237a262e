"""An optimizer group's settings as JSON values, and back."""

from collections.abc import Sequence
from typing import Any

import torch

from .errors import CheckpointError
from .text import shown


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
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value


def _is_alike(value: Any, current: Any) -> bool:
    """Whether a saved setting can take the place of the group's; one that is None or unknown here may become anything."""
    if value is None or current is None:
        return True
    if isinstance(current, bool | str) or torch.is_tensor(current):
        kind: Any = (bool, int, float) if torch.is_tensor(current) else type(current)
        return isinstance(value, kind) or torch.is_tensor(value)
    if isinstance(current, int | float):
        return (isinstance(value, int | float) and abs(value) < 2**63) or torch.is_tensor(value)
    if isinstance(current, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(current)
    return True


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON values: everything but its parameters."""
    return {
        key: value.item() if torch.is_tensor(value) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def same_groups(saved: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]) -> bool:
    """Whether the saved groups hold the same parameters as these."""
    return [set(group["parameters"]) for group in saved] == [set(group) for group in names]
