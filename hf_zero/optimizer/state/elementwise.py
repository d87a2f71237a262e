"""Whether an optimizer updates each element by itself, and so may be given parts of parameters."""

from collections.abc import Iterable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from ...config import AUTO, ConfigError, ZeroConfig
from .state_kinds import double_of, enter_training, own_step, settings_of


class UpdateScope(Enum):
    """What the update of an element depends on.

    ELEMENT: that element alone. PARAMETER: the parameter it is in (a norm, a row's mean, a matrix product). MODEL: other
    parameters too. UNKNOWN: the optimizer could not be tried.
    """

    ELEMENT = "element"
    PARAMETER = "parameter"
    MODEL = "model"
    UNKNOWN = "unknown"


_OF_TORCH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Of torch.optim, and element-wise whatever their settings; `capturable` ones could not be tried on the host."""

_NOT_STEPPED_SO = {
    "lbfgs": "calls backward in the middle of its step",
    "lomo": "steps inside backward",
    "adalomo": "steps inside backward",
    "sparseadam": "wants sparse gradients, which have no place in a flat bucket",
}
"""Lower-case class name → why no layout fits."""

_SHAPE = (4, 6)
_CUT = 10

_LARGE_SHAPE = (128, 96)
"""A multiple of the usual 256 elements of a block, and above the usual 4096 below which state is not in blocks."""

_LARGE_CUT = 4105
_SCALES = (1.0, 0.1, 0.3)
"""Of the gradients of three steps on it: a sign of their average then hangs on the digits of each."""


def refuse_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Raises `ValueError` for an optimizer that steps another one, such as Lookahead or SAM."""
    name = type(optimizer).__name__
    inner = next((value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is not None:
        raise ValueError(
            f"hf_zero: the optimizer {name} has another one in it, {type(inner).__name__}, whose state would be in no shard and "
            f"in no checkpoint. Prepare the {type(inner).__name__} by itself, or train without hf_zero."
        )


def keeps_intact(optimizer: torch.optim.Optimizer, config: ZeroConfig, *, shards: int) -> bool:
    """Whether parameters must not be cut for this optimizer, each being one rank's whole.

    Args:
        config: `split_parameters` of auto judges the optimizer, True and False are the user's word for one that cannot be
            tried.
        shards: ranks over which its parameters are dealt.

    Raises:
        ConfigError: `split_parameters: true` for an optimizer that looks further than an element.
        ValueError: an optimizer that no layout suits.
    """
    name = type(optimizer).__name__
    if name.lower() in _NOT_STEPPED_SO:
        raise ValueError(
            f"hf_zero: the optimizer {name} {_NOT_STEPPED_SO[name.lower()]}, so it cannot be stepped over shards. Use AdamW, "
            "Adam, SGD, RMSprop, Adagrad, NAdam, RAdam, Lion, Muon, Adafactor, ..., or train without hf_zero."
        )
    scope = update_scope_of(optimizer)
    if scope is UpdateScope.MODEL and (shards > 1 or config.steps_by_bucket):
        raise ValueError(
            f"hf_zero: the optimizer {name} updates a parameter by what other parameters are, and here only some of them are "
            "stepped at a time. Set `stage: 0`, where each rank has all, without `offload.optimizer: nvme` and `rounding: "
            "stochastic` and `moments: 8bit`, which step a bucket at a time; or use another optimizer."
        )
    split = config.split_parameters
    if split is True and scope in (UpdateScope.PARAMETER, UpdateScope.MODEL):
        raise ConfigError(
            f"hf_zero config: `split_parameters: true`, and the optimizer {name} updates an element by what the rest of its "
            "parameter is, so that parts of it would be trained otherwise than the whole. Leave `split_parameters` at auto."
        )
    return scope is not UpdateScope.ELEMENT if split == AUTO else not split


def is_of_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it finds a Parameter's settings as bitsandbytes does: by identity, and by the place in `param_groups`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("get_config", "check_overrides"))


def kept_by_parameter(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any] | set[Any]]:
    """Dicts and sets that the optimizer keeps beside its state, and in which a parameter of it, or its `id`, is a key."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = (value for name, value in vars(optimizer).items() if name != "state" and isinstance(value, dict | set))
    return [held for held in own if any((id(key) if torch.is_tensor(key) else key) in ids for key in held)]


def update_scope_of(optimizer: torch.optim.Optimizer) -> UpdateScope:
    """How far the optimizer looks by the settings of any of its groups, seen by trial steps of copies that leave it alone.

    Two matrices are stepped together, each alone, and cut into flat pieces, and so is a larger one; whatever gives the same
    values does not tell those cases apart. What a step finds by a Parameter's identity, no trial shows: that is looked for.
    """
    if type(optimizer) in [getattr(torch.optim, name) for name in _OF_TORCH]:
        return UpdateScope.ELEMENT
    # What a script has said of a parameter is said of the whole.
    least = UpdateScope.ELEMENT
    if is_of_bitsandbytes(optimizer) or kept_by_parameter(optimizer):
        least = UpdateScope.PARAMETER
    # An optimizer may do in some groups only what it is chosen for: Muon's step, GaLore's projection, LAMB's trust ratio.
    scopes = (_scope_with(optimizer, settings) for settings in _unlike_settings(optimizer))
    return max((least, *scopes), key=_REACH.index)


_REACH = (UpdateScope.ELEMENT, UpdateScope.UNKNOWN, UpdateScope.PARAMETER, UpdateScope.MODEL)


def _unlike_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Those of the optimizer's groups, once each. A group for each layer, with a learning rate of its own, is no other trial."""
    # A learning rate of 0 (warm-up) would hide every difference.
    found = [settings_of(group) | {"lr": 0.1, "initial_lr": 0.1} for group in optimizer.param_groups]
    for settings in found:
        # A trial has parameters of its own.
        settings.pop("param_names", None)
    return list({repr(sorted(settings.items())): settings for settings in found}.values()) or [{"lr": 0.1}]


def _scope_with(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> UpdateScope:
    generator = torch.Generator().manual_seed(0)
    matrices, gradients = ([torch.randn(_SHAPE, generator=generator) for _ in range(2)] for _ in range(2))
    # Unlike each other in each piece, so that whatever is taken over a parameter or several (a sign, a norm) differs.
    gradients[0].abs_().view(-1)[_CUT:].mul_(-3.0)
    gradients[1].mul_(0.1)

    def stepped(values: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return _stepped(optimizer, settings, values, [gradients, gradients])

    try:
        together = stepped(matrices, gradients)
        alone = [*stepped(matrices[:1], gradients[:1]), *stepped(matrices[1:], gradients[1:])]
    except Exception:
        # A class that cannot step outside its own construction tells nothing about its arithmetic.
        return UpdateScope.UNKNOWN
    if _same(together, matrices):
        # Nor does one that has others step in its place.
        return UpdateScope.UNKNOWN
    if not _same(together, alone):
        return UpdateScope.MODEL
    try:
        pieces = stepped(_cut(matrices[0]), _cut(gradients[0]))
    except Exception:
        # Made for matrices.
        return UpdateScope.PARAMETER
    is_of_elements = _same(pieces, _cut(alone[0])) and not _looks_at_size(optimizer, settings)
    return UpdateScope.ELEMENT if is_of_elements else UpdateScope.PARAMETER


def _looks_at_size(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> bool:
    """Whether pieces of a larger matrix are stepped otherwise than the whole, as by optimizers that keep state in blocks."""
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = (torch.randn(_LARGE_SHAPE, generator=generator) * scale for scale in (1.0, *_SCALES))
    try:
        [whole] = _stepped(optimizer, settings, [matrix], [[gradient] for gradient in gradients])
        cut = partial(_cut, at=_LARGE_CUT)
        pieces = _stepped(optimizer, settings, cut(matrix), list(map(cut, gradients)))
    except Exception:
        # It can step a small matrix and its pieces, and these not.
        return True
    return not _same(pieces, cut(whole))


def _cut(whole: torch.Tensor, at: int = _CUT) -> list[torch.Tensor]:
    flat = whole.reshape(-1)
    return [flat[:at], flat[at:]]


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(some, others, strict=True))


def _stepped(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    values: list[torch.Tensor],
    passes: Iterable[list[torch.Tensor]],
) -> list[torch.Tensor]:
    """The values behind a step with the gradients of each of `passes`."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    trial = double_of(optimizer, settings_of(settings) | {"params": parameters}, {})
    with torch.random.fork_rng(devices=[]):
        enter_training(trial)
        for gradients in passes:
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone()
            own_step(trial)
    return [parameter.detach() for parameter in parameters]
