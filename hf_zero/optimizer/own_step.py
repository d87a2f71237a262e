"""An optimizer's own step, without its hooks and with the script's arguments, and doubles of an optimizer for trial steps."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments that a script passes to `optimizer.step`: positional and keyword arguments."""


NO_ARGUMENTS: Arguments = ((), {})


_ARGUMENTS = "_hf_zero_arguments"


def arguments_of(optimizer: torch.optim.Optimizer) -> Arguments:
    """Returns the script's arguments to the running step."""
    return optimizer.__dict__.get(_ARGUMENTS, NO_ARGUMENTS)


def note_arguments(optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
    """Passes these arguments to `own_step` of this optimizer from now on."""
    if arguments != NO_ARGUMENTS:
        optimizer.__dict__[_ARGUMENTS] = arguments
    else:
        optimizer.__dict__.pop(_ARGUMENTS, None)


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether class and step are torch's own. Such a step ignores parameters without a gradient."""
    kind: Any = type(optimizer)
    return all(made.__module__.startswith("torch.optim.") for made in (kind, kind.step))


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """Runs the optimizer's arithmetic without its step hooks, with the noted arguments."""
    # torch wraps the step of an optimizer class in the calls of its hooks when the first object of the class is made. If the
    # step of a class calls its parent's step, a second wrapper runs. So remove all hooks for the call.
    step: Any = type(optimizer).step
    inner = step.__wrapped__ if getattr(step, "hooked", False) else step
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        args, kwargs = arguments_of(optimizer)
        inner(optimizer, *args, **kwargs)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def enter_training(optimizer: torch.optim.Optimizer) -> None:
    """Calls `train()` of schedule-free optimizers, which refuse to step without this call."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def double_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], state: Mapping[torch.Tensor, dict[str, Any]]
) -> torch.optim.Optimizer:
    """Makes an optimizer like this one with its own group and state. Its step does not change this optimizer.

    Its methods are those of the class, without replacements by a scheduler or an engine.
    """
    kind = type(optimizer)
    # Skip `__init__`, whose arguments are unknown.
    double = object.__new__(kind)
    # Copy the attributes, because `copy.copy` would leave out attributes other than the groups of some classes.
    attributes = optimizer.__dict__.items()
    double.__dict__.update({name: value for name, value in attributes if not callable(getattr(kind, name, None))})
    double.param_groups, double.state = [group], defaultdict(dict, state)
    return double


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies an optimizer group without its parameters."""
    # Copy deeply, because the step of a double may write to a tensor or list in the settings.
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def group_with(group: Mapping[str, Any], wanted: Callable[[torch.Tensor], bool]) -> dict[str, Any]:
    """Copies an optimizer group with some of its parameters, and with their names if the group has names."""
    return _reduced(group, [index for index, tensor in enumerate(group["params"]) if wanted(tensor)])


def group_of(group: Mapping[str, Any], tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Copies an optimizer group with only `tensors` as parameters."""
    # Each step calls this for every bucket, so the loops over all parameters of the group are in C.
    mine, parameters = set(map(id, tensors)), group["params"]
    return _reduced(group, list(compress(range(len(parameters)), map(mine.__contains__, map(id, parameters)))))


def _reduced(group: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    parallel = [name for name in ("params", "param_names") if name in group]
    return {**group, **{name: [group[name][index] for index in chosen] for name in parallel}}


def initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns the state after one step of a double with lr 0 and zero gradients, like torch's DCP helpers."""
    doubles = {p: nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=p.device)) for p in parameters}
    for double in doubles.values():
        double.grad = torch.zeros_like(double)
    settings = settings_of(group) | {"params": list(doubles.values())}
    if "lr" in settings:
        settings["lr"] = torch.zeros_like(settings["lr"]) if torch.is_tensor(settings["lr"]) else 0.0
    trial = double_of(optimizer, settings, {})
    enter_training(trial)
    own_step(trial)
    return {p: dict(trial.state.get(double, {})) for p, double in doubles.items()}
