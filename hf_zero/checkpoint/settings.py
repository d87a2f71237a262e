"""An optimizer group's settings as JSON values, and back."""

from collections.abc import Sequence
from typing import Any

import torch


def restore_settings(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Puts saved group settings (learning rate, betas, …) back; lists become tuples where the group has tuples."""
    for key, value in saved.items():
        current = group.get(key)
        if torch.is_tensor(current):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value


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
