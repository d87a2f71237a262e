"""Decides for each optimizer whether its parameters may be cut, and refuses optimizers without a suitable layout."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..buckets.precision import resolve_precision
from ..buckets.unread_weights import wanted_dtype
from ..config import ZeroConfig
from .known import known_scope, refuse_unsuited
from .own_step import settings_of
from .schedule_free import has_modes
from .trial import Finding, UpdateScope, try_optimizer


def refuse_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Raises `ValueError` for an optimizer around another one, such as Lookahead or SAM, or without support for shards."""
    refuse_unsuited(optimizer)
    name = type(optimizer).__name__
    inner = next((value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is not None:
        raise ValueError(
            f"hf_zero: the optimizer {name} contains another optimizer, {type(inner).__name__}, and the inner state would not "
            f"be sharded or saved. Prepare only the {type(inner).__name__}, or train without hf_zero."
        )


def keeps_intact(optimizer: torch.optim.Optimizer, found: Finding, config: ZeroConfig, *, shards: int) -> bool:
    """Whether parameters of this optimizer must not be cut, so that each parameter is whole on one rank.

    Args:
        found: the result of `find_scope`.
        config: whether buckets are stepped one at a time.
        shards: number of ranks that share the parameters.

    Raises:
        ValueError: the optimizer's update depends on several parameters, of which a step only has some.
    """
    if found.scope is UpdateScope.MODEL and (shards > 1 or config.steps_by_bucket):
        raise ValueError(
            f"hf_zero: the optimizer {type(optimizer).__name__} needs other parameters to update a parameter ({found.reason}), "
            "but a rank steps only some parameters. Set `stage: 0` without `offload.optimizer: nvme`, `rounding: stochastic`, "
            "`moments: 8bit`, or change the optimizer."
        )
    return found.scope is not UpdateScope.ELEMENT


_ROOM_TO_STEP = 2
"""Offloaded state is stepped on the device if parameters and gradients need less than 1 / this number of the free memory."""


def steps_on_device(
    config: ZeroConfig,
    optimizers: Iterable[torch.optim.Optimizer],
    device: torch.device,
    parameters: Iterable[tuple[nn.Parameter, int]],
    free_bytes: Callable[[], int | None],
) -> bool:
    """Whether offloaded optimizer state is copied to the training device for a step there, a few buckets at a time.

    Then reduced gradients stay on the device until the step. On a small device, their memory is the reason to step on the host.

    Args:
        parameters: the trained parameters, each with the number of ranks that share its state.
        free_bytes: returns the device's memory for these parameters and everything else that is still to come; None if the
            device has room for every model. Only called if the settings and the optimizers allow such steps.
    """
    offload = config.offload
    may_visit = (
        offload.moves_state
        and not offload.moves_params
        and device.type != "cpu"
        # The step takes one bucket after the other, and nothing else may write to the state.
        and not any(has_modes(each) or find_scope(each).scope in _NOT_BY_BUCKET for each in optimizers)
    )
    if not may_visit:
        return False
    free, needed = free_bytes(), 0
    for parameter, shards in parameters:
        precision = resolve_precision(config, wanted_dtype(parameter))
        whole = parameter.numel() * precision.kept.itemsize // (shards if config.stage == 3 else 1)
        needed += whole + parameter.numel() * precision.master.itemsize // shards
    return free is None or needed * _ROOM_TO_STEP <= free


_NOT_BY_BUCKET = (UpdateScope.MODEL, UpdateScope.UNKNOWN)


def is_of_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer finds a Parameter's settings by identity and index in `param_groups`, as bitsandbytes does."""
    return all(callable(getattr(optimizer, name, None)) for name in ("get_config", "check_overrides"))


def kept_by_parameter(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any] | set[Any]]:
    """Returns the optimizer's own dicts and sets, other than its state, whose keys are parameters or their `id`."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = (value for name, value in vars(optimizer).items() if name != "state" and isinstance(value, dict | set))
    return [held for held in own if any((id(key) if torch.is_tensor(key) else key) in ids for key in held)]


def find_scope(optimizer: torch.optim.Optimizer) -> Finding:
    """Finds the optimizer's widest scope over all of its groups, from the table of known classes or by trials of copies.

    Trials do not cover settings that a step looks up by a Parameter's identity.
    """
    known = known_scope(optimizer)
    if known is not None and not known.wants_trial:
        return known.finding
    # Try each kind of group, because Muon's step, GaLore's projection and LAMB's trust ratio apply only to some groups. The
    # finding is cached on the optimizer while its groups stay the same, because a plan for `stage: auto` asks for each
    # candidate.
    unlike = _unlike_groups(optimizer)
    # Part of the cache key, because a step with collectives may skip them without a process group.
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    asked = repr([(settings, {(p.dim(), p.dtype) for p in parameters}, has_ranks) for settings, parameters in unlike])
    noted = optimizer.__dict__.get(_FOUND)
    if noted is None or noted[0] != asked:
        tried = [try_optimizer(optimizer, *group) for group in unlike]
        noted = optimizer.__dict__[_FOUND] = asked, max(tried, key=lambda finding: finding.scope.reach)
    found: Finding = noted[1]
    if (
        found.scope is UpdateScope.ELEMENT
        and known is None
        and (is_of_bitsandbytes(optimizer) or kept_by_parameter(optimizer))
    ):
        # A script's settings for one parameter apply to the whole parameter.
        return Finding(UpdateScope.PARAMETER, "it keeps settings of single parameters")
    return found


def _unlike_groups(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
    """Returns the distinct settings of the optimizer's groups, ignoring learning rates, each with all of its parameters."""
    unlike: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}
    for group in optimizer.param_groups:
        # Without names, because a trial has its own parameters.
        settings = {name: value for name, value in settings_of(group).items() if name != "param_names"}
        rate = settings.get("initial_lr", settings.get("lr"))
        # Replaced if 0, as in a warm-up, because this would hide every difference.
        rate = rate if isinstance(rate, float | int) and _LEAST_RATE <= rate <= 1 else _RATE
        alike = repr(sorted((name, value) for name, value in settings.items() if name not in ("lr", "initial_lr")))
        of_group = unlike.setdefault(alike, (settings | {"lr": rate, "initial_lr": rate}, []))
        of_group[1].extend(group["params"])
    return list(unlike.values()) or [({"lr": _RATE}, [])]


_FOUND = "_hf_zero_scope"
"""Attribute of a tried optimizer: a description of its groups, and the finding."""
_RATE = 0.1
_LEAST_RATE = 1e-3
"""Learning rate of trials, and the smallest rate accepted from a script."""
