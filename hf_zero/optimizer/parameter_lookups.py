"""Lets optimizers with settings for single parameters find rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..buckets.bucket import Row


def stand_in(held: dict[Any, Any] | set[Any], rows: Iterable[Row]) -> list[Any]:
    """Adds rows next to their parameters to an optimizer's own dict or set; returns the added keys."""
    row_of = {id(row.slot.parameter): row for row in rows}
    added: list[Any] = []
    for key in list(held):
        row = row_of.get(id(key) if torch.is_tensor(key) else key)
        if row is None:
            continue
        added.append(row.tensor if torch.is_tensor(key) else id(row.tensor))
        if isinstance(held, dict):
            held[added[-1]] = held[key]
        else:
            held.add(added[-1])
    return added


def take_out(held: dict[Any, Any] | set[Any], added: Iterable[Any]) -> None:
    """Removes the keys added by `stand_in`."""
    for key in added:
        if isinstance(held, dict):
            held.pop(key, None)
        else:
            held.discard(key)


def look_up_whole(
    optimizer: torch.optim.Optimizer, whole_groups: Sequence[list[nn.Parameter]], rows: Mapping[nn.Parameter, Row]
) -> None:
    """Makes an optimizer of bitsandbytes look a row up under the index of its whole parameter.

    `GlobalOptimManager` finds a script's settings by a Parameter's identity and index. Rows are different tensors, and the
    groups on a rank have fewer entries.

    Args:
        whole_groups: the parameters of each group, as given by the script.
        rows: this rank's row of each parameter with elements on this rank.
    """
    changed: Any = optimizer
    groups = [{"params": whole} for whole in whole_groups]
    index_of = {
        id(rows[p].tensor): (number, index)
        for number, whole in enumerate(whole_groups)
        for index, p in enumerate(whole)
        if p in rows
    }

    @contextmanager
    def in_whole_groups() -> Iterator[None]:
        changed.param_groups, own = groups, changed.param_groups
        try:
            yield
        finally:
            changed.param_groups = own

    def get_config(gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        # Look the index up before the groups are exchanged, because it refers to the groups of rows.
        index = index_of.get(id(changed.param_groups[gindex]["params"][pindex]), (gindex, pindex))
        with in_whole_groups():
            return type(changed).get_config(changed, *index, group)

    def check_overrides() -> None:
        with in_whole_groups():
            type(changed).check_overrides(changed)

    changed.get_config, changed.check_overrides = get_config, check_overrides


def look_up_rows(optimizer: torch.optim.Optimizer) -> None:
    """Undoes `look_up_whole`."""
    for method in ("get_config", "check_overrides"):
        optimizer.__dict__.pop(method, None)
