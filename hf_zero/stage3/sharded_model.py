"""A model at stage 3: hooks on its layers, dtypes of their inputs, and methods of modules whose parameters are sharded."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any, SupportsIndex, cast

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.packed import CodesInPlace, PackedPlaces, beside_packed, take_out_scales
from ..buckets.sharded import ShardedParametersError, are_hidden, show_values
from ..comm.transport import Transport
from ..config import ZeroConfig
from ..engine.buffers import place_buffers
from ..engine.compiled import CompiledLayers
from ..hooks.guards import look_only
from ..hooks.weak import WeakHook, caller_of_hook, engine_attached_to
from ..optimizer.holder import StateHolder
from ..step.collectives import PARAMETERS_IN
from .gathered import IN_GATHERED, GatheredParameters
from .unit import Unit, is_transformed, runs_transformed
from .unsharding import Unsharding

# ---- `state_dict()`, `load_state_dict()`, `.to()` and the like of modules whose parameters are sharded ----

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
        self.units = list(dict.fromkeys(unit for unit, _ in slots.values()))
        self._schedule = schedule
        self._module = module
        # The module's own dict, which takes this one's place again.
        self.stock: dict[str, nn.Parameter | None] = {}

    def follow_units(self) -> None:
        """Follows a change of state of one of the units."""
        # Past `nn.Module.__getattr__`, for speed.
        held: Any = self._module.__dict__["_parameters"]
        if not any([unit.is_sharded for unit in self.units]):
            if held is self:
                self._module.__dict__["_parameters"] = self.stock
            return
        if held is self:
            return
        if held is not self.stock:
            self.stock = held
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
            self._module.__dict__["_parameters"] = self.stock

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
        self.stock[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.stock[name]

    def pop(self, name: str, *default):
        self.stock.pop(name, None)
        return super().pop(name, *default)

    def __deepcopy__(self, memo: dict):
        raise _refusal("copied")

    def __reduce_ex__(self, protocol: SupportsIndex):
        raise _refusal("pickled")


class UnitModules:
    """The modules whose sharded parameters are all of one unit: their dicts are exchanged together, in loops in C.

    Args:
        modules: with what takes the place of their dicts.
    """

    def __init__(self, unit: Unit, modules: Mapping[nn.Module, ShardedParameters]):
        self._unit = unit
        # Past `nn.Module.__getattr__`, for speed.
        self._attributes = [module.__dict__ for module in modules]
        self._sharded = list(modules.values())
        self._stocks: list[dict] = []
        self._follow_each()

    def follow_unit(self) -> None:
        """Follows a change of state of the unit. Each unit comes here twice in a pass."""
        attributes, sharded, stocks = self._attributes, self._sharded, self._stocks
        held = map(PARAMETERS_IN, attributes)
        if not self._unit.is_sharded:
            if all(map(is_, held, sharded)):
                any(map(dict.__setitem__, attributes, repeat("_parameters"), stocks))
                return
        elif all(map(is_, held, stocks)):
            # `update` and `__setitem__` return None, so `any` goes on to the end.
            any(map(dict.update, sharded, stocks))
            # Otherwise a module's own dict has lost a name.
            if list(map(len, sharded)) == list(map(len, stocks)):
                any(map(dict.__setitem__, attributes, repeat("_parameters"), sharded))
                return
        self._follow_each()

    def _follow_each(self) -> None:
        for each in self._sharded:
            each.follow_units()
        self._stocks = [each.stock for each in self._sharded]


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

    @property
    def __func__(self) -> Callable[..., Any]:
        """What torch.compile traces in place of this method: inside a compiled layer, the parameters are whole."""
        name = next(name for name, held in self._module.__dict__.items() if held is self)
        return getattr(type(self._module), name)

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
        # Of adapters that are being merged: what is gathered just now.
        self._merging: ExitStack | None = None
        # Whether the ranks have met for the load that runs.
        self._is_loading = False
        # What models from the Hub with a way of their own to generate have in the place of their class's.
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
        with self._to_edit(module, "merge_and_unload"):
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
            self._merging.enter_context(self._to_edit(module, name))
        packed = PackedPlaces(module)
        merged = getattr(type(module), name)(module, *args, **kwargs)
        packed.take_back()
        return merged

    def _to_edit(self, module: nn.Module, name: str) -> AbstractContextManager[None]:
        """Gathers a module's parameters to edit, for its method of this name. Collective unless they are gathered already."""
        parameters = list(module.parameters())
        engine = next(filter(None, map(engine_attached_to, parameters)), None)
        if engine is None or self._gathered.are_held(parameters):
            return nullcontext()
        return engine.gathered(parameters, writeback=True, purpose=f"{name}() of {type(module).__name__}")

    def _deepcopy(self, module: nn.Module, memo: dict) -> nn.Module:
        """An ordinary module with whole parameters, which no engine has. Collective, unless they are gathered already."""
        parameters = list(module.parameters())
        is_held = self._gathered.are_held(parameters)
        if not is_held:
            self._gathered.meet(f"copy.deepcopy() of {type(module).__name__}", IN_GATHERED)
        with nullcontext() if is_held else self._gathered.gathered(parameters, writeback=False):
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

    def _load_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # Each rank loads its shard only: one that came alone, or with different values, would leave a mixture of two models.
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
            # Through the `load_state_dict` of a module around the model, which is the script's own.
            self._meet_to_load(module)
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


# ---- Layer norms with 16-bit weights on the CPU: their inputs are cast to the dtype of the weights ----
#
# Autocast has an accelerator normalise in float32, whatever the dtypes. On the CPU it leaves layer norms alone, and torch
# refuses float32 inputs beside bfloat16 weights.


class CastInput:
    """Takes the place of a norm's `forward`, and casts its input. A hook on the module would cost the host five times as much.

    Args:
        norm: a layer or group norm.
    """

    def __init__(self, norm: nn.Module):
        self._norm = norm
        self._forward = norm.forward
        self._before = norm.__dict__.get("forward")
        norm.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and args[0].dtype == torch.float32 and (weight := cast(Any, self._norm).weight) is not None:
            return self._forward(args[0].to(weight.dtype), *args[1:], **kwargs)
        return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Gives the norm its own `forward` back, unless a script has replaced it since."""
        held = self._norm.__dict__
        if held.get("forward") is self:
            del held["forward"]
            if self._before is not None:
                held["forward"] = self._before

    def __deepcopy__(self, memo: dict):
        raise _refusal("copied")

    def __reduce_ex__(self, protocol: SupportsIndex):
        raise _refusal("pickled")


def cast_norm_inputs(modules: Iterable[nn.Module]) -> list[CastInput]:
    """Casts the inputs of the layer and group norms among `modules` to the dtypes of their weights."""
    return [CastInput(module) for module in modules if isinstance(module, nn.LayerNorm | nn.GroupNorm)]


# ---- A model whose parameters live in units: the units, their hooks, and what the model's own methods do meanwhile ----

_HOST = torch.device("cpu")


class ShardedModel:
    """The units of stage 3, and their hooks and methods on the model. Without units, idle.

    Args:
        schedule: of the units, the root first.
        transport: between all ranks that have the model.
        holder: has their masters.
        device: that parameters are gathered on.

    Attributes:
        schedule: gathers and drops.
        gathered: gathers parameters outside of forward and backward.
        unit_of: unit and slot of each sharded parameter.
        edits: how often a script has edited a sharded parameter, each rank its own elements.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Unsharding,
        transport: Transport,
        holder: StateHolder,
        config: ZeroConfig,
        *,
        device: torch.device,
    ):
        self._model = model
        self._home = _HOST if config.offload.moves_params else device
        self.schedule = schedule
        self.root, *layers = schedule.units
        self.unit_of: dict[nn.Parameter, tuple[Unit, ParameterSlot]] = {
            slot.parameter: (unit, slot) for unit in self.schedule.units for slot in unit.slots
        }
        self.gathered = GatheredParameters(
            self.unit_of, self.schedule, transport, holder, device, config.comm.meeting_timeout_s
        )
        self._unit_of_bucket = {bucket: unit for unit in self.schedule.units for bucket in unit.buckets}
        self.edits = 0
        self._sharded = self._guard_modules()
        self._methods = ModuleMethods(model, self._sharded, self.gathered)
        self._layers = [(model.get_submodule(name), unit) for unit in layers for name in unit.modules]
        self._compiled: list[CompiledLayers] = []
        self._handles: list[RemovableHandle | CastInput] = [*self._install_hooks()]
        self._codes = CodesInPlace(model) if self.unit_of else None
        if device.type == "cpu":
            self._handles += cast_norm_inputs(module for module in self._sharded if self._casts_weights_of(module))

    @property
    def is_empty(self) -> bool:
        return not self.unit_of

    def compile_layers(self, entry: nn.Module) -> int:
        """Has what the script has compiled as a whole compiled layer by layer; returns how many layers are."""
        layers = [module for module, _ in self._layers]
        self._compiled.append(CompiledLayers([*entry.modules(), *self._model.modules()], layers))
        return len(self._compiled[-1])

    def before_forward(self) -> None:
        """Called before each forward of the model outside of a backward, where there are units."""
        if not self._is_passed_by(self.root, refuses=True):
            # An exception in a forward or backward has left units whole, or running.
            self.schedule.recover()
            self.schedule.before_forward(self.root)

    def after_forward(self, outputs: object) -> None:
        """Passes the outputs of a forward to the schedule."""
        if not self._is_passed_by(self.root):
            self.schedule.after_forward(self.root, outputs)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of this rank's shards of the frozen parameters."""
        buckets = (bucket for unit in self.schedule.units for bucket in unit.buckets)
        return sum(bucket.memory.lasting_bytes for bucket in buckets if not bucket.trained)

    @contextmanager
    def lent(self, model: nn.Module, purpose: str, *, wanted: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Where `wanted`, parameters are whole copies in host memory until the context is left. Collective on the way in.

        The state dicts of the model and of its parts have them, and so do forwards. Yields the model's, {} where not `wanted`.

        Args:
            model: one of the engine's models.
        """
        with self.gathered.lend_copies(model, purpose, wanted=wanted) as copies:
            if not wanted:
                yield {}
                return
            lent = {copy.data_ptr() for copy in copies.values()}
            state = model.state_dict(keep_vars=True)
            # One copy of a tied weight, so that savers see that it is one.
            # Lent copies lie in host memory and belong to nobody else: no second copy is made.
            own = {id(value): value.detach().to("cpu", copy=value.data_ptr() not in lent) for value in state.values()}
            yield {name: own[id(value)] for name, value in state.items()}

    def hand_back(self, *, wanted: bool) -> None:
        """Leaves an ordinary model: whole parameters where `wanted`, on the meta device elsewhere. Collective.

        Parameters of which the device had only a few at a time come back in host memory, and buffers with them.
        """
        whole: dict[ParameterSlot, torch.Tensor] = {}
        for unit in self.schedule.units:
            self.schedule.unshard([unit])
            if wanted:
                whole.update((slot, slot.parameter.detach().to(self._home, copy=True)) for slot in unit.slots)
            self.schedule.release([unit])
        # Before the new data: hidden parameters refuse them.
        self._remove()
        if whole:
            place_buffers(self._model, self._home)
        for slot, values in whole.items():
            slot.parameter.data = values
        if self._codes is not None:
            self._codes.end()
        take_out_scales(self._model)
        if not wanted:
            self._move_to_meta()

    def gather_in_pass(self, parameter: nn.Parameter) -> bool:
        """Makes a parameter whole that code in a forward or backward reads; False outside of both, where ranks may be apart."""
        if not self.schedule.in_pass:
            return False
        self.schedule.before_read(self.unit_of[parameter][0])
        return True

    def edit_own(self, parameter: nn.Parameter, edit: Callable[[torch.Tensor], object]) -> bool:
        """Edits this rank's elements of a sharded parameter, a flat copy of which `edit` is given; False inside a pass."""
        unit, slot = self.unit_of[parameter]
        if self.schedule.in_pass or not unit.is_sharded:
            return False
        # Copies on their way have the values before the edit.
        self.schedule.forget_copies(unit)
        bucket = slot.bucket
        part = bucket.own_parts.get(slot)
        if part is not None:
            with torch.no_grad():
                own = bucket.memory.own_part(part.in_shard).clone()
                edit(own)
                bucket.memory.write_own_part(part.in_shard, own)
        # On all ranks, also those without elements of it: the versions must stay the same everywhere.
        unit.count_edit(slot)
        self.edits += 1
        return True

    def follow_step(self, bucket: Bucket, stepped: Sequence[ParameterSlot]) -> None:
        """Counts a step's writes to parameters of a bucket as no edits of the script's."""
        # A parameter of one rank alone, as of an expert that is on no other rank, is in no unit.
        unit = self._unit_of_bucket.get(bucket)
        if unit is not None:
            unit.follow_step(bucket, stepped)

    def _move_to_meta(self) -> None:
        on_meta = {p: nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in self.unit_of}
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter in on_meta:
                    module._parameters[name] = on_meta[parameter]

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._methods.remove()
        for compiled in reversed(self._compiled):
            compiled.undo()
        for unit in self.schedule.units:
            unit.followers.clear()
        for sharded in self._sharded.values():
            sharded.remove()
        for parameter in self.unit_of:
            show_values(parameter)

    def _guard_modules(self) -> dict[nn.Module, ShardedParameters]:
        found = {}
        for module in self._model.modules():
            slots = {name: self.unit_of[p] for name, p in module._parameters.items() if p in self.unit_of}
            if slots:
                found[module] = ShardedParameters(module, slots, self.schedule)
        for unit in self.schedule.units:
            modules = {module: sharded for module, sharded in found.items() if sharded.units == [unit]}
            if modules:
                unit.followers.append(UnitModules(unit, modules).follow_unit)
        for sharded in found.values():
            if len(sharded.units) > 1:
                for unit in sharded.units:
                    unit.followers.append(sharded.follow_units)
                sharded.follow_units()
        return found

    def _install_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for module, unit in self._layers:
            before = WeakHook(self, partial(ShardedModel._before_layer, unit=unit))
            after = WeakHook(self, partial(ShardedModel._after_layer, unit=unit))
            # Before other hooks, some of which read the layer's parameters: bitsandbytes' codes, and a script's own.
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            # always_call: non-reentrant checkpointing leaves the recomputed forward by an exception.
            handles.append(module.register_forward_hook(after, always_call=True))
        for module in self._sharded:
            if any(p in self.unit_of and self.unit_of[p][0] is self.root for p in module._parameters.values()):
                # An encoder or embedding may be called by itself, past the model's own forward.
                hook = WeakHook(self, ShardedModel._before_part_of_root)
                handles.append(module.register_forward_pre_hook(hook, prepend=True))
        return handles

    def _casts_weights_of(self, module: nn.Module) -> bool:
        slots = [self.unit_of[p][1] for p in module._parameters.values() if p in self.unit_of]
        return any(slot.bucket.precision.casts for slot in slots)

    def _is_passed_by(self, unit: Unit, *, refuses: bool = False) -> bool:
        """Whether a forward passes without the engine. Errors: as of `runs_transformed`."""
        # While copies are lent, one rank alone may call a part of the model: what it saves is computed (a prompt encoder's).
        gathered = self.gathered
        if not (gathered.is_lent or is_transformed()):
            # Nearly always.
            return False
        return gathered.is_lent or runs_transformed(unit, is_watched=gathered.watching > 0, refuses=refuses)

    def _before_layer(self, _module: nn.Module, args: tuple, kwargs: dict, unit: Unit) -> None:
        if not self._is_passed_by(unit, refuses=True):
            self.schedule.before_forward(unit, (*args, *kwargs.values()))

    def _after_layer(self, _module: nn.Module, _args: tuple, outputs: object, unit: Unit) -> None:
        if not self._is_passed_by(unit):
            self.schedule.after_forward(unit, outputs, has_returned=outputs is not None or not _is_behind_exception())

    def _before_part_of_root(self, _module: nn.Module, _args: tuple) -> None:
        if not self._is_passed_by(self.root, refuses=True):
            self.schedule.before_read(self.root)


def _is_behind_exception() -> bool:
    """Whether torch calls the hook that asks because an exception has ended the forward (`always_call`)."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    # The frame that handles an exception is the first in its traceback. A script may handle another one further out.
    return trace is not None and trace.tb_frame is caller_of_hook()


# Forwards in another dtype than that of training, such as an evaluation in bfloat16; the model stays as it was.


@contextmanager
def computing_in(model: nn.Module, sharded: ShardedModel, dtype: torch.dtype) -> Iterator[None]:
    """Floating-point parameters and buffers are of `dtype`, as after `model.to(dtype)`. Not for training; on every rank."""
    spared = beside_packed(model) | sharded.unit_of.keys()
    whole = {p: p.data for p in model.parameters() if p not in spared and p.is_floating_point()}
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    try:
        _read_as(sharded, dtype)
        _hang({parameter: values.to(dtype) for parameter, values in whole.items()})
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(dtype)
        yield
    finally:
        _read_as(sharded, None)
        _hang(whole)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _hang(values: dict[nn.Parameter, torch.Tensor]) -> None:
    for parameter, data in values.items():
        parameter.data = data


def _read_as(sharded: ShardedModel, dtype: torch.dtype | None) -> None:
    # Whole parameters are of the dtype before: they have to be gathered again.
    sharded.schedule.reshard_all()
    for unit, slot in sharded.unit_of.values():
        unit.memories[slot.bucket].read_as = None if slot.bucket.key.is_packed else dtype
        unit.set_data(slot)
