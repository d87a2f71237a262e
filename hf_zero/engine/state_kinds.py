"""What an optimizer will keep for each element, seen by a trial before its first step."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .precision import Precision

_SHAPE = (4, 4)
"""Of the trial parameter: a matrix, for optimizers that are made for those."""


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's arithmetic without the step hooks around it.

    torch wraps the step of each optimizer class in the calls of its hooks when the first of the class is made. A class whose
    step calls its parent's comes by a second wrapper, which finds no hooks of this optimizer for the moment.
    """
    step = type(optimizer).step
    inner = step.__wrapped__ if getattr(step, "hooked", False) else step
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        inner(optimizer)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def state_kinds(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[str, torch.dtype], ...] | None:
    """(name, dtype) of each state tensor with one value an element, for rows of `dtype` in a group with these settings.

    A copy of the optimizer steps once on a small matrix. None where it cannot be copied so.
    """
    parameter = nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    trial = copy.copy(optimizer)
    group = {name: copy.deepcopy(value) for name, value in settings.items() if name != "params"}
    trial.param_groups, trial.state = [group | {"params": [parameter]}], defaultdict(dict)
    try:
        with torch.random.fork_rng(devices=[]):
            own_step(trial)
    except Exception:
        # A class that cannot step outside its own construction tells nothing beforehand; the caller decides what that means.
        return None
    return tuple(
        (name, value.dtype)
        for name, value in trial.state[parameter].items()
        if torch.is_tensor(value) and value.shape == _SHAPE
    )


def tier_bytes_needed(
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    precision_of: Callable[[nn.Parameter], Precision],
    shards: int,
    *,
    with_gradients: bool,
) -> int:
    """Bytes of masters and optimizer state that one of `shards` ranks keeps of its part; `with_gradients`, of those too.

    State that cannot be known beforehand counts nothing.

    Args:
        owner: (optimizer, group) of each trained parameter.
    """
    kinds: dict[tuple, int] = {}
    total = 0
    for parameter, (index, group) in owner.items():
        precision = precision_of(parameter)
        key = (index, group, precision.master)
        if key not in kinds:
            optimizer = optimizers[index] if index >= 0 else None
            found = state_kinds(optimizer, optimizer.param_groups[group], precision.master) if optimizer else ()
            kinds[key] = sum(dtype.itemsize for _, dtype in found or ())
        master = precision.master.itemsize if precision.has_master else 0
        gradient = precision.master.itemsize if with_gradients else 0
        total += parameter.numel() * (kinds[key] + master + gradient)
    return total // shards
