"""`state_dict()`, `load_state_dict()`, `.to()` and the like of modules whose parameters are sharded."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, SupportsIndex, cast

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..buckets.packed import PackedPlaces
from ..buckets.sharded_parameter import ShardedParametersError, show_values
from ..hooks.guards import look_only
from ..hooks.weak import engine_attached_to
from .gathered import IN_GATHERED, GatheredParameters
from .sharded_parameters import ShardedParameters, copy_refusal

_SYNCED = "_is_fsdp_managed_module"
"""transformers' mark for modules whose forward is collective. It is set only on a generating model, only during `generate`, and
not on its submodules: encoders with LayerDrop also read the mark, and then run the layers that they would have dropped."""


# TRL pushes weights to vLLM in a loop over `named_parameters()`, on all ranks. Other code loops over parameters, too:
# optimizers, weight decay groups, peft, prints on one rank. Such code needs no values and must not wait for other ranks, and
# `p.data` does not show whether values are needed. So only the modules of TRL listed below get values, because each of their
# loops is a push. The engine uses no other name of TRL. If a release moves the loop to a different module, reading a value
# raises as everywhere else.
#
# Other ways to support TRL cost more. With a DeepSpeed plugin in accelerate's state, TRL imports deepspeed, even for reference
# models. With an FSDP plugin, Trainer saves as with FSDP. `DistributedBackend.gather_params` would have to be replaced in TRL's
# class, for all models, and requests all parameters at once if there are adapters.
_PUSHING = frozenset({"trl.generation.vllm_generation", "trl.experimental.online_dpo.online_dpo_trainer"})
"""Modules whose loops over `named_parameters()` read values, on all ranks."""


class ReplacedMethod:
    """Replaces a method of one module. Copies and pickles of the module raise."""

    def __init__(self, function: Callable[..., Any], module: nn.Module):
        self._function = function
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The class's method, which torch.compile traces instead: inside a compiled layer, the parameters are whole."""
        name = next(name for name, held in self._module.__dict__.items() if held is self)
        return getattr(type(self._module), name)

    def __deepcopy__(self, memo: dict):
        raise copy_refusal("copied")

    def __reduce_ex__(self, protocol: SupportsIndex):
        raise copy_refusal("pickled")


class ModuleMethods:
    """Replaces methods that read or write parameters, on each module with sharded parameters in it or in a submodule.

    `state_dict` and `save_pretrained` gather, `load_state_dict` stores this rank's part of the given values, and `.to()`,
    `.half()` and similar methods raise unless they change nothing. `generate` runs until all ranks have reached their last token.
    """

    _MERGING_LAYERS = (("merge_adapter", "merge"), ("unmerge_adapter", "unmerge"))
    """peft's methods that edit the base model's weights layer by layer, and the method of each layer."""

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
        "load_state_dict",
        "_load_from_state_dict",
        "_apply",
        "zero_grad",
        "generate",
    )

    def __init__(self, model: nn.Module, sharded: Mapping[nn.Module, ShardedParameters], gathered: GatheredParameters):
        self._sharded = sharded
        self._gathered = gathered
        self._modules = [module for module in model.modules() if any(m in sharded for m in module.modules())]
        # While adapters are being merged: the context of the layer gathered now.
        self._merging: ExitStack | None = None
        # Whether the ranks have met for the running load.
        self._is_loading = False
        # The instance's own `generate`, which some models from the Hub set instead of their class's method.
        self._own_generate: dict[nn.Module, Callable[..., Any]] = {}
        for module in self._modules:
            changed: Any = module
            if "generate" in module.__dict__:
                self._own_generate[module] = changed.generate
            if "generate" in module.__dict__ or hasattr(type(module), "generate"):
                changed.generate = ReplacedMethod(self._generate, module)
            changed.state_dict = ReplacedMethod(self._state_dict, module)
            changed.load_state_dict = ReplacedMethod(self._load_state_dict, module)
            if hasattr(type(module), "save_pretrained"):
                changed.save_pretrained = ReplacedMethod(self._save_pretrained, module)
            if hasattr(type(module), "adapter_state_dict"):
                changed.adapter_state_dict = ReplacedMethod(self._adapter_state_dict, module)
            for name, of_layer in self._MERGING_LAYERS:
                if hasattr(type(module), name):
                    setattr(changed, name, ReplacedMethod(partial(self._merge_layers, name), module))
                # `get_base_layer` distinguishes peft's layers from other modules with a method `merge`.
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
            # With a static cache, transformers compiles the forward, and would trace the hooks that gather.
            kwargs.setdefault("disable_compile", True)
        if not self._gathered.forwards_are_collective(module):
            return stock(*args, **kwargs)
        if "synced_gpus" in signature.parameters:
            # Even if the caller passes False, as Seq2SeqTrainer does. Otherwise ranks hang when one stops early.
            given = signature.bind(*args, **kwargs)
            given.arguments["synced_gpus"] = True
            args, kwargs = given.args, given.kwargs
        # A `generate` without this argument, or one that passes the original value on, reads the mark.
        module.__dict__[_SYNCED] = True
        try:
            return stock(*args, **kwargs)
        finally:
            module.__dict__.pop(_SYNCED, None)

    def _merge_and_unload(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        packed = PackedPlaces(module)
        with self._to_edit(module, "merge_and_unload"):
            merged = cast(Any, type(module)).merge_and_unload(module, *args, **kwargs)
            # Inside the context, which keeps edits only of the engine's Parameters. The merge has replaced packed parameters.
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
            # Release the previous unit first. A unit stays gathered for all of its layers.
            self._merging.close()
            self._merging.enter_context(self._to_edit(module, name))
        packed = PackedPlaces(module)
        merged = getattr(type(module), name)(module, *args, **kwargs)
        packed.take_back()
        return merged

    def _to_edit(self, module: nn.Module, name: str) -> AbstractContextManager[None]:
        """Gathers a module's parameters for an edit by its method `name`. Collective unless they are already gathered."""
        parameters = list(module.parameters())
        engine = next(filter(None, map(engine_attached_to, parameters)), None)
        if engine is None or self._gathered.are_held(parameters):
            return nullcontext()
        return engine.gathered(parameters, writeback=True, purpose=f"{name}() of {type(module).__name__}")

    def _deepcopy(self, module: nn.Module, memo: dict) -> nn.Module:
        """Returns a plain copy with whole parameters and without an engine. Collective unless they are already gathered."""
        parameters = list(module.parameters())
        is_held = self._gathered.are_held(parameters)
        if not is_held:
            self._gathered.meet(f"copy.deepcopy() of {type(module).__name__}", IN_GATHERED)
        with nullcontext() if is_held else self._gathered.gathered(parameters, writeback=False):
            # Skip the replaced methods, whose copies raise. The copy has the methods of its class.
            held = {name: each for name, each in module.__dict__.items() if not isinstance(each, ReplacedMethod)}
            if module in self._own_generate:
                held["generate"] = self._own_generate[module]
            # Added to `memo` before the submodules are copied: their references to this module become references to the copy.
            copied = memo[id(module)] = type(module).__new__(type(module))
            copied.__dict__.update(copy.deepcopy(held, memo))
        return copied

    def _parameters_of(self, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        stock = type(module).parameters(module, *args, **kwargs)
        # Frame 1 is `ReplacedMethod.__call__`, frame 2 its caller.
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
        # Without the context, reads of `grad` would be slow, and training loops call zero_grad at each step.
        with look_only():
            type(module).zero_grad(module, *args, **kwargs)

    def _state_dict(self, module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        stock = type(module).state_dict
        if self._gathered.uses_copies:
            return stock(module, *args, **kwargs)
        with self._gathered.use_copies(module, f"state_dict() of {type(module).__name__}") as copies:
            result = stock(module, *args, **kwargs)
            # With `keep_vars` the values are the parameters themselves, whose data is hidden again after the context.
            for name, value in result.items():
                if isinstance(value, nn.Parameter) and value in copies:
                    result[name] = copies[value]
        return result

    def _save_pretrained(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stock = partial(cast(Any, type(module)).save_pretrained, module, *args, **kwargs)
        given = next((value for value in (*args, kwargs.get("state_dict")) if isinstance(value, Mapping)), None)
        if given is not None:
            if not given and kwargs.get("is_main_process") is False:
                # accelerator.get_state_dict returns values only on the main process. peft would look for them on this rank, too.
                return None
            # Maybe called on only one rank. Only names and shapes of parameters are needed.
            with self._gathered.without_values():
                return stock()
        # All ranks meet before anything is written.
        with self._gathered.use_copies(module, f"save_pretrained() of {type(module).__name__}"):
            return stock()

    def _adapter_state_dict(
        self, module: nn.Module, adapter_name: str, state_dict: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns peft's part of a state dict for a module in `modules_to_save`."""
        if not state_dict:
            # accelerator.get_state_dict returns values only on the main process.
            return {}
        # Maybe called on only one rank. Only the names in the state dict are needed.
        with self._gathered.without_values():
            return cast(Any, type(module)).adapter_state_dict(module, adapter_name, state_dict)

    def _load_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # Each rank loads only its shard. A call on only some ranks, or with different values, would result in mixed models.
        if self._gathered.forwards_are_collective(module):
            purpose = self._meet_to_load(module)
            self._gathered.refuse_other_values(module, state_dict, purpose)
        self._is_loading = True
        try:
            return type(module).load_state_dict(module, state_dict, *args, **kwargs)
        finally:
            self._is_loading = False

    def _meet_to_load(self, module: nn.Module) -> str:
        purpose = f"load_state_dict() of {type(module).__name__}"
        self._gathered.meet(purpose, f"{IN_GATHERED}, with writeback=True")
        return purpose

    def _load_from_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if not self._is_loading and self._gathered.forwards_are_collective(module):
            # Called through the `load_state_dict` of the script's module around the model.
            self._meet_to_load(module)
        # Inside `gathered`, parameters are loaded in place; the end of this context keeps or refuses the edit.
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
            values = {id(value) for value in state_dict.values()}
            for slot, unit in sharded.items():
                # Keep the shard if the load has not written the parameter (a key of a different shape), because this memory is
                # empty. Keep it also if the parameter is loaded from itself: torch's DCP helpers fill in missing names that way.
                is_written = slot.parameter._version != versions[slot] and id(slot.parameter) not in values
                unit.store(slot, written=is_written)

    def _apply(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for inner in module.modules() if recurse else [module]:
            for _, slot in self._sharded[inner].slots.values() if inner in self._sharded else ():
                # Try with an empty tensor first. Nothing may be moved before all parameters have been checked.
                here = torch.empty(0, dtype=slot.parameter.dtype, device=slot.bucket.device)
                there = fn(here)
                # With different dtypes of the shard and the gathered values, both are allowed.
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
