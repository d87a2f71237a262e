"""`state_dict()`, `load_state_dict()`, `.to()` and the like of modules whose parameters are sharded."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, SupportsIndex, cast

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..buckets.bucket import ParameterSlot
from ..buckets.packed import PackedPlaces
from ..buckets.sharded import ShardedParametersError, are_hidden, show_values
from ..guard import look_only
from ..hooks import engine_attached_to
from .gathered import GatheredParameters
from .schedule import Unsharding
from .unit import Unit

_SYNCED = "_is_fsdp_managed_module"
"""transformers' mark on modules whose forward is collective. Encoders that drop layers read it, too, and then run what they have
drawn to drop: it is on a model that generates, for as long as that lasts, and on none of its parts."""

# TRL pushes weights to vLLM by a walk over `named_parameters()`, on all ranks. Others walk, too: optimizers, weight decay groups,
# peft, prints on one rank. These need the parameters alone and must not wait for other ranks, and `p.data` does not tell whether
# values are wanted. So values are given to modules of TRL whose every walk is a push, by the modules' names: the engine knows no
# other name of TRL, private or public. Where a release has moved the walk, reading a value raises as everywhere else.
#
# Other doors of TRL cost more. A DeepSpeed plugin in accelerate's state has TRL import deepspeed, also for reference models.
# An FSDP plugin there has Trainer save as FSDP does. `DistributedBackend.gather_params` would have to be replaced in TRL's
# class, for all models, and asks for all parameters at once where there are adapters.
_PUSHING = frozenset({"trl.generation.vllm_generation", "trl.experimental.online_dpo.online_dpo_trainer"})
"""Modules whose walks over `named_parameters()` read values, on all ranks."""


class ShardedParameters(dict):
    """Takes the place of one module's `_parameters` while any unit with a parameter of the module is sharded.

    Shapes, dtypes and names can be looked at. A value read by another module's forward is gathered first; copying and
    pickling raise.

    Attributes:
        slots: unit and slot of each of the module's sharded parameters, by its name in the module.
    """

    def __init__(self, module: nn.Module, slots: Mapping[str, tuple[Unit, ParameterSlot]], schedule: Unsharding):
        super().__init__()
        self.slots = dict(slots)
        # Nearly every module's parameters are of one unit.
        self._unit, *self._others = dict.fromkeys(unit for unit, _ in slots.values())
        self._schedule = schedule
        self._module = module
        # The module's own dict, which takes this one's place again.
        self._stock: dict[str, nn.Parameter | None] = {}

    def follow_units(self) -> None:
        """Follows a change of state of one of the units. Each module of each unit comes here twice in a pass."""
        # Past `nn.Module.__getattr__`, for speed.
        held: Any = self._module.__dict__["_parameters"]
        if not (self._unit.is_sharded or (self._others and any([unit.is_sharded for unit in self._others]))):
            if held is self:
                self._module.__dict__["_parameters"] = self._stock
            return
        if held is self:
            return
        if held is not self._stock:
            self._stock = held
            self.clear()
        self.update(held)
        if len(self) != len(held):
            # The module's own dict has lost a name.
            self.clear()
            self.update(held)
        self._module.__dict__["_parameters"] = self

    def remove(self) -> None:
        """Restores the module's own dict, in any state."""
        if self._module.__dict__["_parameters"] is self:
            self._module.__dict__["_parameters"] = self._stock

    def _before_read(self, name: str) -> None:
        # Outside a pass a read is a look at shape or dtype, maybe on one rank alone. What is whole is read as it is: its layer is
        # at work, or is kept. (A dict that waits for other parameters of the module may still lead here.)
        if name in self.slots and self._schedule.in_pass and are_hidden(self.slots[name][1].parameter):
            self._schedule.before_read(self.slots[name][0])

    def __getitem__(self, name: str):
        self._before_read(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value) -> None:
        # In both dicts, here and in the two methods below: the module's own takes this one's place when the units are whole.
        super().__setitem__(name, value)
        self._stock[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._stock[name]

    def pop(self, name: str, *default):
        self._stock.pop(name, None)
        return super().pop(name, *default)

    def __deepcopy__(self, memo: dict):
        raise _refusal("copied")

    def __reduce_ex__(self, protocol: SupportsIndex):
        raise _refusal("pickled")


def _refusal(verb: str) -> ShardedParametersError:
    return ShardedParametersError(
        f"hf_zero: a model whose parameters are sharded over the ranks (stage 3) cannot be {verb}. Save it with "
        "save_pretrained, accelerator.save_model or torch.save(model.state_dict()) on all ranks, or copy it before "
        "accelerator.prepare or after engine.close()."
    )


class ReplacedMethod:
    """Replaces a method of one module. Copies and pickles of the module raise."""

    def __init__(self, function: Callable[..., Any], module: nn.Module):
        self._function = function
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict):
        raise _refusal("copied")

    def __reduce_ex__(self, protocol: SupportsIndex):
        raise _refusal("pickled")


class ModuleMethods:
    """Replaces, on each module that holds sharded parameters somewhere, the methods that read or write them.

    `state_dict` and `save_pretrained` gather, `load_state_dict` takes this rank's part of what it is given, and `.to()`,
    `.half()` and the like raise unless they change nothing. `generate` goes on until all ranks have come to their last token.
    """

    _MERGING_LAYERS = (("merge_adapter", "merge"), ("unmerge_adapter", "unmerge"))
    """peft's, which edit the base's weights layer by layer, and the layers' own."""

    _REPLACED = (
        "merge_adapter",
        "unmerge_adapter",
        "merge",
        "unmerge",
        "merge_and_unload",
        "__deepcopy__",
        "parameters",
        "named_parameters",
        "state_dict",
        "save_pretrained",
        "adapter_state_dict",
        "_load_from_state_dict",
        "_apply",
        "zero_grad",
        "generate",
    )

    def __init__(self, model: nn.Module, sharded: Mapping[nn.Module, ShardedParameters], gathered: GatheredParameters):
        self._sharded = sharded
        self._gathered = gathered
        self._modules = [module for module in model.modules() if any(m in sharded for m in module.modules())]
        # Of adapters that are being merged: what is gathered just now.
        self._merging: ExitStack | None = None
        # What models from the Hub with a way of their own to generate have in the place of their class's.
        self._own_generate: dict[nn.Module, Callable[..., Any]] = {}
        for module in self._modules:
            changed: Any = module
            if "generate" in module.__dict__:
                self._own_generate[module] = changed.generate
            if "generate" in module.__dict__ or hasattr(type(module), "generate"):
                changed.generate = ReplacedMethod(self._generate, module)
            changed.state_dict = ReplacedMethod(self._state_dict, module)
            if hasattr(type(module), "save_pretrained"):
                changed.save_pretrained = ReplacedMethod(self._save_pretrained, module)
            if hasattr(type(module), "adapter_state_dict"):
                changed.adapter_state_dict = ReplacedMethod(self._adapter_state_dict, module)
            for name, of_layer in self._MERGING_LAYERS:
                if hasattr(type(module), name):
                    setattr(changed, name, ReplacedMethod(partial(self._merge_layers, name), module))
                # `get_base_layer` tells peft's layers from other modules that have a method `merge`.
                if hasattr(type(module), of_layer) and hasattr(type(module), "get_base_layer"):
                    setattr(changed, of_layer, ReplacedMethod(partial(self._merge_layer, of_layer), module))
            if hasattr(type(module), "merge_and_unload"):
                changed.merge_and_unload = ReplacedMethod(self._merge_and_unload, module)
            changed.__deepcopy__ = ReplacedMethod(self._deepcopy, module)
            changed.parameters = ReplacedMethod(self._parameters_of, module)
            changed.named_parameters = ReplacedMethod(self._named_parameters_of, module)
            changed._apply = ReplacedMethod(self._apply, module)
            changed.zero_grad = ReplacedMethod(self._zero_grad, module)
            if module in sharded:
                changed._load_from_state_dict = ReplacedMethod(self._load_from_state_dict, module)

    def remove(self) -> None:
        for module in self._modules:
            for name in self._REPLACED:
                module.__dict__.pop(name, None)
        for module, stock in self._own_generate.items():
            module.__dict__["generate"] = stock

    def _generate(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stock = self._own_generate.get(module) or partial(cast(Any, type(module)).generate, module)
        signature = inspect.signature(stock)
        if "generation_config" in signature.parameters:
            # With a static cache transformers compiles the forward, and the compiler would trace the hooks that gather.
            kwargs.setdefault("disable_compile", True)
        if not self._gathered.forwards_are_collective(module):
            return stock(*args, **kwargs)
        if "synced_gpus" in signature.parameters:
            # Also where it is False, as Seq2SeqTrainer gives it: ranks that stop would leave the others waiting.
            given = signature.bind(*args, **kwargs)
            given.arguments["synced_gpus"] = True
            args, kwargs = given.args, given.kwargs
        # Those that have no such argument, or hand it on as it was, ask for the mark.
        module.__dict__[_SYNCED] = True
        try:
            return stock(*args, **kwargs)
        finally:
            module.__dict__.pop(_SYNCED, None)

    def _merge_and_unload(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        packed = PackedPlaces(module)
        with self._to_edit(module.parameters()):
            merged = cast(Any, type(module)).merge_and_unload(module, *args, **kwargs)
            # Inside the context, which keeps edits of the engine's Parameters: the merge has put others in packed ones' places.
            packed.take_back()
        return merged

    def _merge_layers(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stock = partial(getattr(type(module), name), module, *args, **kwargs)
        try:
            with ExitStack() as self._merging:
                return stock()
        finally:
            self._merging = None

    def _merge_layer(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._merging is None:
            return getattr(type(module), name)(module, *args, **kwargs)
        if not self._gathered.are_held(module.parameters()):
            # The unit before it goes first. One stays for all of its layers, which then hold it.
            self._merging.close()
            self._merging.enter_context(self._to_edit(module.parameters()))
        packed = PackedPlaces(module)
        merged = getattr(type(module), name)(module, *args, **kwargs)
        packed.take_back()
        return merged

    def _to_edit(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        parameters = list(parameters)
        engine = next(filter(None, map(engine_attached_to, parameters)), None)
        if engine is None or self._gathered.are_held(parameters):
            return nullcontext()
        return engine.gathered(parameters, writeback=True)

    def _deepcopy(self, module: nn.Module, memo: dict) -> nn.Module:
        """An ordinary module with whole parameters, which no engine has. Collective, unless they are gathered already."""
        parameters = list(module.parameters())
        with (
            nullcontext()
            if self._gathered.are_held(parameters)
            else self._gathered.gathered(parameters, writeback=False)
        ):
            # Without the replaced methods, whose copies raise: the copy has those of its class.
            held = {name: each for name, each in module.__dict__.items() if not isinstance(each, ReplacedMethod)}
            if module in self._own_generate:
                held["generate"] = self._own_generate[module]
            # In `memo` before its parts are copied: a part that refers to this module finds the copy.
            copied = memo[id(module)] = type(module).__new__(type(module))
            copied.__dict__.update(copy.deepcopy(held, memo))
        return copied

    def _parameters_of(self, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        stock = type(module).parameters(module, *args, **kwargs)
        # `ReplacedMethod.__call__` lies between.
        if sys._getframe(2).f_code is not AveragedModel.update_parameters.__code__:
            return stock
        whole = self._gathered.one_by_one(enumerate(stock), "update_parameters() of an AveragedModel")
        return (parameter for _, parameter in whole)

    def _named_parameters_of(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        stock = type(module).named_parameters(module, *args, **kwargs)
        walker = sys._getframe(2).f_globals.get("__name__")
        return self._gathered.one_by_one(stock, f"a push of weights by {walker}") if walker in _PUSHING else stock

    def _zero_grad(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Training loops call it at each step.
        with look_only():
            type(module).zero_grad(module, *args, **kwargs)

    def _state_dict(self, module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        stock = type(module).state_dict
        if self._gathered.is_lent:
            return stock(module, *args, **kwargs)
        with self._gathered.lend_copies(module, f"state_dict() of {type(module).__name__}") as copies:
            result = stock(module, *args, **kwargs)
            # With `keep_vars` these are the parameters themselves, whose values are hidden again behind the context.
            for name, value in result.items():
                if isinstance(value, nn.Parameter) and value in copies:
                    result[name] = copies[value]
        return result

    def _save_pretrained(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stock = partial(cast(Any, type(module)).save_pretrained, module, *args, **kwargs)
        given = next((value for value in (*args, kwargs.get("state_dict")) if isinstance(value, Mapping)), None)
        if given is not None:
            if not given and kwargs.get("is_main_process") is False:
                # accelerator.get_state_dict gives the values to the main process only; peft would look for them here.
                return None
            # Maybe on one rank alone. Of parts of the model it only asks what they hold.
            with self._gathered.lend_names():
                return stock()
        # Ranks meet before anything is written.
        with self._gathered.lend_copies(module, f"save_pretrained() of {type(module).__name__}"):
            return stock()

    def _adapter_state_dict(
        self, module: nn.Module, adapter_name: str, state_dict: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns peft's part of a state dict for a module that an adapter trains whole."""
        if not state_dict:
            # accelerator.get_state_dict gives the values to the main process only.
            return {}
        # Maybe on one rank alone. Of its own state dict it only asks the names.
        with self._gathered.lend_names():
            return cast(Any, type(module)).adapter_state_dict(module, adapter_name, state_dict)

    def _load_from_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # Parameters that `gathered` holds are loaded where they are; the end of that context keeps the edit or refuses it.
        sharded = {
            slot: unit
            for name, (unit, slot) in self._sharded[module].slots.items()
            if f"{prefix}{name}" in state_dict and not unit.holds
        }
        self._gathered.release(set(sharded.values()))
        versions = {}
        for slot in sharded:
            parameter = slot.parameter
            show_values(parameter)
            kept = slot.bucket.precision.kept
            parameter.data = torch.empty(parameter.shape, dtype=kept, device=slot.bucket.device)
            versions[slot] = parameter._version
        try:
            type(module)._load_from_state_dict(module, state_dict, prefix, *args)
        finally:
            for slot, unit in sharded.items():
                # A parameter that the load has not written (a key of another shape) keeps its shard: this memory has no values.
                unit.store(slot, written=slot.parameter._version != versions[slot])

    def _apply(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for inner in module.modules() if recurse else [module]:
            for _, slot in self._sharded[inner].slots.values() if inner in self._sharded else ():
                # Tried without elements: nothing is moved before all parameters have been looked at.
                here = torch.empty(0, dtype=slot.parameter.dtype, device=slot.bucket.device)
                there = fn(here)
                # What is gathered in another dtype than it is kept in is of both.
                dtypes = (here.dtype, slot.bucket.precision.kept)
                if there.dtype not in dtypes or there.device != here.device:
                    raise ShardedParametersError(
                        f"hf_zero: {type(module).__name__} holds parameters that are sharded over the ranks (stage 3), such as "
                        f"{slot.name!r}, and cannot be moved or cast ({here.dtype} on {here.device} to {there.dtype} on "
                        f"{there.device}). Do that before accelerator.prepare, or after engine.close()."
                    )
        for inner in module.modules() if recurse else [module]:
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[name] = fn(buffer)
        return module
