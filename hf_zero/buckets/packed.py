"""Packed weights: frozen parameters whose elements are codes (integers, booleans, complex numbers, eight bits), and their scales.

bitsandbytes keeps a weight's codes in the Parameter, and its scales beside that. Of four bits the scales are an eighth of the
codes, so that a rank keeps its shard of both. Of eight bits they are one number a row, which each rank has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..comm.ledger import Label
from ..comm.transport import Transport

_SCALES = "absmax"
_REPACKS = "support_avx512bf16_for_cpu"


def is_packed(parameter: nn.Parameter) -> bool:
    """Whether a parameter is frozen, and a cast or rounding of its elements would give another weight."""
    dtype = parameter.dtype
    # Eight bits are codes even where torch calls the dtype a float: a float8 weight means little without the scales beside it.
    is_code = dtype.itemsize == 1 or not dtype.is_floating_point
    return not parameter.requires_grad and (is_code or _state_of(parameter) is not None)


def beside_packed(model: nn.Module) -> frozenset[nn.Parameter]:
    """Returns packed weights, and all parameters of the modules that hold one: such a module casts its own inputs."""
    held = [list(module.parameters(recurse=False)) for module in model.modules()]
    return frozenset(p for parameters in held if any(map(is_packed, parameters)) for p in parameters)


def refuse_inner_tensors(name: str, parameter: nn.Parameter) -> None:
    """Raises `ValueError` for a trained parameter with its values in inner tensors, which no step would reach."""
    if _has_inner_tensors(parameter):
        raise ValueError(
            f"hf_zero: {name!r} is a trained {type(parameter).__name__}, which keeps its values in tensors of its own, and "
            "buckets hold a parameter's own memory. Train a plain Parameter, and convert it in the layer's forward."
        )


def _has_inner_tensors(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a wrapper subclass; the DTensors of a split model are trained by their local tensors."""
    return hasattr(parameter, "__tensor_flatten__") and not hasattr(parameter, "device_mesh")


def refuse_unpackable(name: str, parameter: nn.Parameter, *, sharded: bool) -> None:
    """Raises `ValueError` for a frozen parameter that is still to be quantised; or whose codes are not found to be `sharded`."""
    kind = type(parameter).__name__
    if sharded and _has_inner_tensors(parameter):
        raise ValueError(
            f"hf_zero: {name!r} is a {kind}, which keeps its values in tensors of its own, and stage 3 shards a parameter's own "
            "memory. Use stage 2, or quantise the base with bitsandbytes."
        )
    if sharded and getattr(_state_of(parameter), "packing_format_for_cpu", False):
        raise ValueError(
            f"hf_zero: an evaluation has repacked {name!r} for this processor, and stage 3 shards weights as they are saved. "
            "Load the base anew, and evaluate behind accelerator.prepare."
        )
    is_open = not getattr(parameter, "has_fp16_weights", True) and parameter.dtype != torch.int8
    if is_open or not getattr(parameter, "bnb_quantized", True):
        raise ValueError(
            f"hf_zero: {name!r} is a {kind} of {parameter.dtype}, which is not quantised yet. Call model.to(device), which "
            "quantises, before accelerator.prepare."
        )


def _state_of(parameter: torch.Tensor | None) -> Any:
    """Returns the shape, blocks and scales of a weight in four bits; None for another."""
    return getattr(parameter, "quant_state", None)


# ---- Scales of weights in four bits, as frozen parameters of their modules ----


def add_scales(model: nn.Module) -> None:
    """Makes the scales of weights in four bits frozen parameters of their modules, to be sharded and gathered with the codes."""
    for module in model.modules():
        for name, state in _states_in(module):
            if not isinstance(state.absmax, nn.Parameter):
                state.absmax = nn.Parameter(state.absmax, requires_grad=False)
            # Past `register_parameter`, which allows no dot: the name is that of the scales in the module's state dict.
            module._parameters[f"{name}.{_SCALES}"] = state.absmax


def take_out_scales(model: nn.Module) -> None:
    """Undoes `add_scales`: scales are tensors again, and modules have the parameters that they were built with."""
    for module in model.modules():
        for name, state in _states_in(module):
            scales = module._parameters.pop(f"{name}.{_SCALES}", None)
            # A merged adapter leaves a new weight with scales of its own.
            if scales is not None and isinstance(state.absmax, nn.Parameter):
                state.absmax = state.absmax.data


def added_scales(model: nn.Module) -> frozenset[nn.Parameter]:
    """Returns the parameters of `add_scales`, which the model has at stage 3 alone."""
    scales = (state.absmax for module in model.modules() for _, state in _states_in(module))
    return frozenset(each for each in scales if isinstance(each, nn.Parameter))


@contextmanager
def scales_as_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, the model has the parameters of a model that is sharded."""
    add_scales(model)
    try:
        yield
    finally:
        take_out_scales(model)


def _states_in(module: nn.Module) -> list[tuple[str, Any]]:
    states = [(name, _state_of(p)) for name, p in module.named_parameters(recurse=False, remove_duplicate=False)]
    return [(name, state) for name, state in states if state is not None]


# ---- What lies beside the parameters: whole on each rank, and rank 0's, as the codes are ----


def _beside(model: nn.Module) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yields (holder, attribute, tensor) of scales and tables that are no parameters; several holders may share one."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            state = _state_of(parameter)
            inner = getattr(state, "state2", None)
            places = [(holder, name) for holder in (state, inner) for name in (_SCALES, "code", "offset")]
            for holder, name in [*places, (parameter, "SCB"), (module.__dict__.get("state"), "SCB")]:
                held = None if holder is None else holder.__dict__.get(name)
                if isinstance(held, torch.Tensor) and not isinstance(held, nn.Parameter):
                    yield holder, name, held


def bytes_beside(model: nn.Module) -> int:
    """Counts bytes of scales and tables that lie beside packed weights, and are no parameters."""
    return sum({id(held): held.nbytes for _, _, held in _beside(model)}.values())


def shapes_beside(model: nn.Module) -> list[tuple[int, ...]]:
    """Returns the shapes of these tensors, on which ranks must agree."""
    return [tuple(held.shape) for _, _, held in _beside(model)]


def start_alike(model: nn.Module, device: torch.device, transport: Transport) -> None:
    """Moves these tensors to the device, and gives every rank those of rank 0. Collective."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for holder, name, held in list(_beside(model)):
        if id(held) not in moved:
            # With the tensor of before, so that no other has its identity.
            moved[id(held)] = held, held.to(device)
            transport.broadcast(moved[id(held)][1], Label(kind="broadcast parameters", subject="the model"))
        setattr(holder, name, moved[id(held)][1])


# ---- Modules of bitsandbytes that keep the codes under a second name, or repack them ----


class CodesInPlace:
    """Has the modules of a model read the codes where the engine puts them, until `end`."""

    def __init__(self, model: nn.Module):
        self._handles: list[RemovableHandle] = []
        self._repacking = [module for module in model.modules() if getattr(module, _REPACKS, False)]
        for module in self._repacking:
            # An evaluation would repack gathered codes, and the shards would not know.
            setattr(module, _REPACKS, False)
        self._in_eight_bits: list[Any] = [module for module in model.modules() if _is_in_eight_bits(module)]
        for module in self._in_eight_bits:
            weight, state = module.weight, module.__dict__.get("state")
            # The codes as they were loaded: under this name they would stay in memory, whole.
            weight.CB = None
            if state is not None:
                weight.SCB = weight.SCB if state.SCB is None else state.SCB
                self._handles.append(module.register_forward_pre_hook(_read_codes))

    def end(self) -> None:
        """Leaves the modules as after quantising, with the codes that their weights have now."""
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
    # Before each forward: gathered, lent and handed-back codes lie in different memory.
    module.state.CB, module.state.SCB = module.weight.data, module.weight.SCB


class PackedPlaces:
    """The packed weights of a module's parts. A merge of adapters puts new Parameters there, in which the engine has no shard."""

    def __init__(self, module: nn.Module):
        self._places = [
            (part, name, parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if isinstance(parameter, nn.Parameter) and is_packed(parameter)
        ]

    @torch.no_grad()
    def take_back(self) -> None:
        """Copies codes and scales of new Parameters into those of before, which take their places again."""
        for part, name, parameter in self._places:
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
