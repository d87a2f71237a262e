"""Optimizer state of whole parameters, some of which have come back with another number of rows."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn


def on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with its tensors in host memory."""
    return {name: value.cpu() if torch.is_tensor(value) else value for name, value in state.items()}


def resize_whole(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    states: Mapping[str, Mapping[str, Any]],
    num_tokens: int,
    **kwargs: Any,
) -> None:
    """`model.resize_token_embeddings` of a model that no engine holds, with its optimizers' state.

    Args:
        states: parameter name → its whole state, which the optimizers get.
        kwargs: passed on to `resize_token_embeddings`.
    """
    before = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in before.items()}
    cast(Any, model).resize_token_embeddings(num_tokens, **kwargs)
    _renew_resized(model, shapes)
    put_state_back(optimizers, states, shapes, before, dict(model.named_parameters()))


def _renew_resized(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Hangs new Parameter objects in the place of those that were given data of another shape than in `shapes`.

    A graph that is still alive (the last step's loss) expects gradients of the old shape for the old object.
    """
    renewed = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if name in shapes and parameter.shape != shapes[name]
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in renewed:
                module._parameters[name] = renewed[parameter]


def put_state_back(
    optimizers: Sequence[torch.optim.Optimizer],
    states: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
) -> None:
    """Gives the optimizers the parameters `after` in the place of those `before`, with the state of the latter.

    Args:
        states: parameter name → its whole state; tensors of the old shape get the new one, zero where they had nothing. Where
            some are of neither shape (factors of rows, say), a resized parameter starts without state.
        shapes: of the parameters before.
    """
    replacement = {parameter: after[name] for name, parameter in before.items() if name in after}
    name_of = {parameter: name for name, parameter in after.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replacement.get(parameter, parameter) for parameter in group["params"]]
            for parameter in group["params"]:
                name = name_of.get(parameter)
                if name is None or not states.get(name):
                    continue
                old_shape = shapes[name]
                if _can_be_fitted(states[name], old_shape, parameter.shape):
                    optimizer.state[parameter] = {
                        kind: _fitted(value, old_shape, parameter.shape) for kind, value in states[name].items()
                    }


def _can_be_fitted(state: Mapping[str, Any], old_shape: torch.Size, new_shape: torch.Size) -> bool:
    tensors = [value for value in state.values() if torch.is_tensor(value) and value.dim() > 0]
    return old_shape == new_shape or all(value.shape == old_shape for value in tensors)


def _fitted(value: Any, old_shape: torch.Size, new_shape: torch.Size) -> Any:
    if not torch.is_tensor(value) or value.shape != old_shape or old_shape == new_shape:
        return value
    fitted = value.new_zeros(new_shape)
    common = tuple(slice(0, min(old, new)) for old, new in zip(old_shape, new_shape))
    fitted[common] = value[common]
    return fitted
