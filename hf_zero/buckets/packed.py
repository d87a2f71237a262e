"""Packed weights: frozen parameters whose elements are codes (integers, booleans, complex numbers, eight bits), and their scales.

bitsandbytes stores a weight's codes in the Parameter, and its scales separately. For four bits, the scales have an eighth of the
codes' bytes, so a rank stores its shard of both. For eight bits, there is one scale per row of the weight, and each rank stores
all scales.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..comm.transport import Transport
from ..comm.waits import Label

_SCALES = "absmax"
_REPACKS = "support_avx512bf16_for_cpu"


def is_packed(parameter: nn.Parameter) -> bool:
    """Whether a parameter is frozen, and casting or rounding its elements would change the weight."""
    dtype = parameter.dtype
    # One-byte elements are codes even if torch calls the dtype a float: a float8 weight means little without its scales.
    is_code = dtype.itemsize == 1 or not dtype.is_floating_point
    return not parameter.requires_grad and (is_code or _state_of(parameter) is not None)


def of_packed_modules(model: nn.Module) -> frozenset[nn.Parameter]:
    """Returns packed weights, and all parameters of modules with a packed weight, because such modules cast their own inputs."""
    held = [list(module.parameters(recurse=False)) for module in model.modules()]
    return frozenset(p for parameters in held if any(map(is_packed, parameters)) for p in parameters)


def refuse_inner_tensors(name: str, parameter: nn.Parameter) -> None:
    """Raises `ValueError` for a trained parameter with its values in inner tensors, which no step would update."""
    if _has_inner_tensors(parameter):
        raise ValueError(
            f"hf_zero: {name!r} is a trained {type(parameter).__name__}, which keeps its values in inner tensors, but buckets "
            "hold a parameter's own memory. Train a plain Parameter, and convert it in the layer's forward."
        )


def _has_inner_tensors(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a wrapper subclass, but no DTensor of a split model, whose local tensor is trained."""
    return hasattr(parameter, "__tensor_flatten__") and not hasattr(parameter, "device_mesh")


def refuse_unpackable(name: str, parameter: nn.Parameter, *, sharded: bool) -> None:
    """Raises `ValueError` for a frozen parameter before its quantization, or with codes unfit for sharding if `sharded`."""
    kind = type(parameter).__name__
    if sharded and _has_inner_tensors(parameter):
        raise ValueError(
            f"hf_zero: {name!r} is a {kind}, which keeps its values in inner tensors, but stage 3 shards a parameter's own "
            "memory. Use stage 2, or quantize the base with bitsandbytes."
        )
    if sharded and getattr(_state_of(parameter), "packing_format_for_cpu", False):
        raise ValueError(
            f"hf_zero: an evaluation repacked {name!r} for this processor, but stage 3 shards weights in their saved layout. "
            "Load the base model again, and evaluate after accelerator.prepare."
        )
    is_open = not getattr(parameter, "has_fp16_weights", True) and parameter.dtype != torch.int8
    if is_open or not getattr(parameter, "bnb_quantized", True):
        raise ValueError(
            f"hf_zero: {name!r} is a {kind} of {parameter.dtype} and is not quantized yet. Call model.to(device), which "
            "quantizes it, before accelerator.prepare."
        )


def _state_of(parameter: torch.Tensor | None) -> Any:
    """Returns the shape, blocks and scales of a weight in four bits; None for other weights."""
    return getattr(parameter, "quant_state", None)


# ---- Scales of weights in four bits, as frozen parameters of their modules ----


def add_scales(model: nn.Module) -> None:
    """Makes the scales of weights in four bits frozen parameters of their modules, sharded and gathered with the codes."""
    for module in model.modules():
        for name, state in _states_in(module):
            if not isinstance(state.absmax, nn.Parameter):
                state.absmax = nn.Parameter(state.absmax, requires_grad=False)
            # Bypass `register_parameter`, which does not allow a dot. The name is the one in the module's state dict.
            module._parameters[f"{name}.{_SCALES}"] = state.absmax


def take_out_scales(model: nn.Module) -> None:
    """Undoes `add_scales`: scales are tensors again, and modules have their original parameters."""
    for module in model.modules():
        for name, state in _states_in(module):
            scales = module._parameters.pop(f"{name}.{_SCALES}", None)
            # A merged adapter leaves a new weight with new scales.
            if scales is not None and isinstance(state.absmax, nn.Parameter):
                state.absmax = state.absmax.data


def added_scales(model: nn.Module) -> frozenset[nn.Parameter]:
    """Returns the parameters of `add_scales`, which only exist at stage 3."""
    scales = (state.absmax for module in model.modules() for _, state in _states_in(module))
    return frozenset(each for each in scales if isinstance(each, nn.Parameter))


@contextmanager
def scales_as_parameters(model: nn.Module) -> Iterator[None]:
    """Gives the model the parameters of a sharded model inside the context."""
    add_scales(model)
    try:
        yield
    finally:
        take_out_scales(model)


def _states_in(module: nn.Module) -> list[tuple[str, Any]]:
    states = [(name, _state_of(p)) for name, p in module.named_parameters(recurse=False, remove_duplicate=False)]
    return [(name, state) for name, state in states if state is not None]


# ---- Scales and tables outside of the parameters: whole on each rank, and equal to rank 0's, like the codes ----


def _scales(model: nn.Module) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yields (holder, attribute, tensor) of scales and tables outside of parameters; several holders may share a tensor."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            state = _state_of(parameter)
            found = [(parameter, "SCB"), (module.__dict__.get("state"), "SCB")]
            if state is not None:
                holders = state, getattr(state, "state2", None)
                found += [(holder, name) for holder in holders for name in (_SCALES, "code", "offset")]
            for holder, name in found:
                held = None if holder is None else holder.__dict__.get(name)
                if isinstance(held, torch.Tensor) and not isinstance(held, nn.Parameter):
                    yield holder, name, held


def bytes_of_scales(model: nn.Module) -> int:
    """Returns the bytes of packed weights' scales and tables outside of parameters."""
    return sum({id(held): held.nbytes for _, _, held in _scales(model)}.values())


def shapes_of_scales(model: nn.Module) -> list[tuple[int, ...]]:
    """Returns the shapes of these tensors, which must be equal on all ranks."""
    return [tuple(held.shape) for _, _, held in _scales(model)]


def start_alike(model: nn.Module, device: torch.device, transport: Transport) -> None:
    """Moves these tensors to the device, and copies rank 0's to every rank. Collective."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for holder, name, held in list(_scales(model)):
        if id(held) not in moved:
            # Keep the old tensor, so no new tensor gets its id.
            moved[id(held)] = held, held.to(device)
            transport.broadcast(moved[id(held)][1], Label(kind="broadcast of parameters", subject="the model"))
        setattr(holder, name, moved[id(held)][1])


# ---- Modules of bitsandbytes that store the codes under a second name, or repack them ----


class CodesInPlace:
    """Makes the modules of a model read the codes from the engine's memory, until `end`."""

    def __init__(self, model: nn.Module):
        self._handles: list[RemovableHandle] = []
        self._repacking = [module for module in model.modules() if getattr(module, _REPACKS, False)]
        for module in self._repacking:
            # An evaluation would repack gathered codes, and the shards would not change.
            setattr(module, _REPACKS, False)
        self._in_eight_bits: list[Any] = [module for module in model.modules() if _is_in_eight_bits(module)]
        for module in self._in_eight_bits:
            weight, state = module.weight, module.__dict__.get("state")
            # Drop the codes as loaded, which would otherwise stay in memory as a whole under this name.
            weight.CB = None
            if state is not None:
                weight.SCB = weight.SCB if state.SCB is None else state.SCB
                self._handles.append(module.register_forward_pre_hook(_read_codes))

    def end(self) -> None:
        """Restores the modules' state after quantization, with the current codes of their weights."""
        for handle in self._handles:
            handle.remove()
        for module in self._repacking:
            setattr(module, _REPACKS, True)
        for module in filter(_is_in_eight_bits, self._in_eight_bits):
            module.weight.CB = module.weight.data


def _is_in_eight_bits(module: nn.Module) -> bool:
    weight: Any = module._parameters.get("weight")
    return hasattr(weight, "SCB") and weight.dtype == torch.int8


def _read_codes(module: Any, _args: tuple) -> None:
    # Update before each forward, because gathered codes may be at different addresses each time.
    module.state.CB, module.state.SCB = module.weight.data, module.weight.SCB


class PackedPlaces:
    """The packed weights of a module's parts. A merge of adapters replaces them by Parameters without shards."""

    def __init__(self, module: nn.Module):
        self._weights = [
            (part, name, parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if isinstance(parameter, nn.Parameter) and is_packed(parameter)
        ]

    @torch.no_grad()
    def take_back(self) -> None:
        """Copies codes and scales of new Parameters into the original ones, which replace the new ones again."""
        for part, name, parameter in self._weights:
            new: Any = part._parameters.get(name)
            if new is None or new is parameter:
                continue
            parameter.copy_(new)
            state, merged = _state_of(parameter), _state_of(new)
            if merged is not None:
                scales = state.absmax
                scales.copy_(merged.absmax)
                state.__dict__.update({**merged.__dict__, _SCALES: scales})
                part.quant_state, cast(Any, parameter).bnb_quantized = state, True
            elif hasattr(new, "SCB"):
                cast(Any, parameter).SCB = new.SCB
            part._parameters[name] = parameter
