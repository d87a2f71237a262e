"""Finds the state of an optimizer before its first step, by a trial step of a double on a small matrix."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..buckets.bucket import Row
from ..buckets.rows import name_of
from .nested_state import CONTAINERS, DUE, PLAIN, flat_state
from .own_step import double_of, enter_training, is_of_torch, own_step, settings_of

_SHAPE = (4, 4)
"""Shape of the trial parameter: a matrix, because some optimizers only support matrices."""

LARGE_SHAPE = (128, 96)
"""Shape of a parameter that optimizers with state in blocks treat as large: a multiple of the usual block of 256 elements, and
above the usual limit of 4096 elements for state in blocks."""

_MOST_TRIED = 128
"""Largest dimension of a parameter on the host whose matrix products are counted."""

_OF_THE_DEVICE = ("capturable", "fused")
"""Settings that a step on the host may refuse, and that do not change the kinds of state."""


class CollectivesRefused(TorchDispatchMode):
    """Raises RuntimeError at each collective of torch.distributed in a trial, because other ranks may not take part.

    Attributes:
        called: name of the last refused collective; None without one.
    """

    called: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        library, name, *_ = str(func).split(".")
        if library in ("c10d", "_c10d_functional"):
            self.called = name.rstrip("_")
            raise RuntimeError(f"{self.called} in a trial step")
        return func(*args, **(kwargs or {}))


def without_collectives() -> AbstractContextManager[CollectivesRefused | None]:
    """Opens a context without collectives. Yields None without a process group, for speed, because then there are none."""
    is_possible = torch.distributed.is_available() and torch.distributed.is_initialized()
    return CollectivesRefused() if is_possible else nullcontext()


@dataclass(frozen=True)
class Trial:
    """The findings of one trial step of an optimizer.

    Attributes:
        kinds: (name, dtype) of each state tensor with one value per element.
        names: names of all state of the parameter.
        has_factors: whether some state tensors have other shapes than the parameter, or are in lists, tuples or dicts.
        unsaved: state unfit for a checkpoint, in words; None without any.
    """

    kinds: tuple[tuple[str, torch.dtype], ...]
    names: frozenset[str]
    has_factors: bool
    unsaved: str | None


def try_step(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, int] = _SHAPE,
) -> Trial | None:
    """Steps a matrix of `dtype` once, in a group with these settings, with a double of the optimizer or a new one.

    Returns None if neither can step.
    """
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    try:
        trial = _step_double(optimizer, settings, parameter)
    except Exception:
        # The class cannot step without its constructor, so this trial shows nothing. The caller decides how to proceed.
        return _try_new(optimizer, settings_of(settings), dtype)
    return _trial_of(trial, parameter)


def _step_double(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: nn.Parameter
) -> torch.optim.Optimizer:
    """Steps a double of the optimizer, whose only group has these settings and this parameter, and returns the double."""
    group = settings_of(settings) | {"params": [parameter]}
    # Drop the names of the optimizer's own parameters, which this group does not contain.
    group.pop("param_names", None)
    double = double_of(optimizer, group, {})
    with torch.random.fork_rng(devices=[]):
        enter_training(double)
        with without_collectives():
            own_step(double)
    return double


def product_flops(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Counts the floating-point operations of the matrix products in a step of one parameter (Muon's orthogonalization).

    The trial step is on the meta device, so it needs no memory. If the optimizer reads values in its step, a parameter with at
    most `_MOST_TRIED` elements per dimension takes the step on the host. Its operations are scaled by the third power of the
    ratio of the dimensions, because each product has three of them. Returns 0 if the optimizer cannot step there either.
    """
    settings, shape = _for_host(settings), tuple(shape)
    try:
        return _flops_of_step(optimizer, settings, torch.empty(shape, device="meta"))
    except Exception:
        # The step reads values, such as a norm, which do not exist on the meta device.
        ratio = max(1.0, max(shape, default=1) / _MOST_TRIED)
    try:
        tried = _flops_of_step(optimizer, settings, torch.zeros([max(1, round(size / ratio)) for size in shape]))
    except Exception:
        # As in `try_step`: no trial step is possible.
        return 0
    return round(tried * ratio**3)


def _flops_of_step(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], values: torch.Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    parameter = nn.Parameter(values)
    parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        _step_double(optimizer, settings, parameter)
    return counter.get_total_flops()


def _trial_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Trial:
    """Collects the findings after a step."""
    state, name = optimizer.state[parameter], type(optimizer).__name__
    tensors = {kind: value for kind, value in state.items() if torch.is_tensor(value)}
    lost = [name_of(kind) for kind, value in flat_state(state).items() if not isinstance(value, PLAIN)]
    unsaved = (
        f"{name} keeps {lost[0]!r}, which is no tensor or number, and no list, tuple or dict of these" if lost else None
    )
    loose = [key for key in optimizer.state if not torch.is_tensor(key)]
    if loose:
        unsaved = f"{name} keeps state of no parameter ({loose[0]!r})"
    return Trial(
        kinds=tuple((kind, value.dtype) for kind, value in tensors.items() if value.shape == parameter.shape),
        names=frozenset(kind for kind, value in state.items() if value is not None),
        has_factors=any(type(value) in CONTAINERS for value in state.values())
        or any(value.numel() > 1 and value.shape != parameter.shape for value in tensors.values()),
        unsaved=unsaved,
    )


def state_kinds(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[str, torch.dtype], ...] | None:
    """Returns (name, dtype) of each state tensor with one value per element, for rows of `dtype` in such a group.

    Returns None if no trial step is possible.
    """
    trial = try_step(optimizer, settings, dtype)
    return None if trial is None else trial.kinds


def kinds_by_size(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether a large parameter has other kinds of state than a small one, for example if only large ones have blocks."""
    if is_of_torch(optimizer):
        return False
    small, large = (try_step(optimizer, settings, dtype, shape) for shape in (_SHAPE, LARGE_SHAPE))
    return small is not None and large is not None and (small.kinds, small.names) != (large.kinds, large.names)


def state_itemsizes(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[int, ...] | None:
    """Returns bytes per element of each kind of state, for parameters of `dtype` in a group with these settings.

    Returns None if no trial step is possible, or if state does not have one value per element (Adafactor's rows and columns).
    """
    trial = _try_on_host(optimizer, settings, dtype)
    return None if trial is None or trial.has_factors else tuple(dtype.itemsize for _, dtype in trial.kinds)


def with_dimensions(
    state: Mapping[str, Any], row: Row, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Reshapes the state of a parameter without dimensions, such as a temperature, to a row with one dimension.

    The moments of such a parameter look like scalars. A trial step on a matrix, in a group with these settings, distinguishes
    the two.
    """
    held = dict(state)
    scalars = {name: value for name, value in state.items() if torch.is_tensor(value) and not value.dim()}
    if row.slot.parameter.dim() or not row.tensor.dim() or not scalars:
        return held
    trial = _try_on_host(optimizer, settings, row.tensor.dtype)
    elementwise = {name for name, _ in trial.kinds} if trial else set()
    held.update(
        (name, value.view(row.tensor.shape))
        for name, value in scalars.items()
        if name in elementwise or name.startswith(DUE)
    )
    return held


def state_names(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of state after a step of a matrix; none if no trial step is possible."""
    trial = _try_on_host(optimizer, settings, torch.float32)
    return frozenset() if trial is None else trial.names


def unsaved_state(optimizer: torch.optim.Optimizer) -> str | None:
    """Names state of a matrix unfit for a checkpoint; None without any, or if no trial step is possible."""
    trials = (_try_on_host(optimizer, group, torch.float32) for group in optimizer.param_groups)
    return next((trial.unsaved for trial in trials if trial is not None and trial.unsaved is not None), None)


def _try_on_host(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype) -> Trial | None:
    """Tries an optimizer for an accelerator on the host."""
    return try_step(optimizer, _for_host(settings), dtype)


def _for_host(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the settings of a group for a step on the host."""
    return {
        name: value.item() if torch.is_tensor(value) and value.numel() == 1 else value
        for name, value in settings_of(settings).items()
    } | {name: False for name in _OF_THE_DEVICE if name in settings}


def _try_new(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype) -> Trial | None:
    """Tries a new optimizer of the class, for classes of torch that create their state in the constructor.

    A double is not constructed, so a double of torch 2.11's Adagrad has no state for a step.
    """
    kind: Any = type(optimizer)
    if not is_of_torch(optimizer):
        return None
    # A group has more entries than the constructor has arguments, such as a scheduler's `initial_lr`.
    asked = {name: settings[name] for name in inspect.signature(kind).parameters if name in settings}
    parameter = nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    try:
        new = kind([parameter], **asked)
        own_step(new)
    except Exception:
        # The class needs another kind of parameter or gradient than a small dense matrix, so nothing is known beforehand.
        return None
    return _trial_of(new, parameter)
