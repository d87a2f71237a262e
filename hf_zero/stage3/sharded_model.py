"""A model at stage 3: hooks on its layers, dtypes of their inputs, and methods of modules whose parameters are sharded."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.packed import CodesInPlace, take_out_scales
from ..buckets.sharded_parameter import show_values
from ..comm.transport import Transport
from ..config import ZeroConfig
from ..engine.buffers import move_buffers
from ..engine.compiled_layers import CompiledLayers
from ..hooks.weak import WeakHook, caller_of_hook
from ..optimizer.storage import OptimizerStorage
from .gathered import GatheredParameters
from .module_methods import ModuleMethods
from .norm_inputs import CastInput, cast_norm_inputs
from .sharded_parameters import ShardedParameters
from .transforms import runs_transformed, transforms
from .unit import Unit
from .unsharding import Unsharding

_HOST = torch.device("cpu")


class ShardedModel:
    """The units of stage 3, with their hooks and replaced methods on the model. Does nothing without units.

    Args:
        schedule: the schedule of the units, with the root as the first unit.
        transport: connects all ranks of the model.
        storage: stores the units' masters.
        device: device of gathered parameters.

    Attributes:
        schedule: gathers and drops units in a pass.
        gathered: gathers parameters outside of forward and backward.
        unit_of: unit and slot of each sharded parameter.
        is_empty: whether no parameter is sharded.
        edits: number of edits of sharded parameters through `edit_own`.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Unsharding,
        transport: Transport,
        storage: OptimizerStorage,
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
        self.is_empty = not self.unit_of
        self.gathered = GatheredParameters(
            self.unit_of, self.schedule, transport, storage, device, config.comm.meeting_timeout_s
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

    def compile_layers(self, entry: nn.Module) -> int:
        """If the script has compiled the whole model, compiles each layer instead; returns the number of compiled layers."""
        layers = [module for module, _ in self._layers]
        self._compiled.append(CompiledLayers([*entry.modules(), *self._model.modules()], layers))
        return len(self._compiled[-1])

    def before_forward(self) -> None:
        """Called before each forward of the model outside of a backward, if there are units."""
        if not self._is_passed_by(self.root, refuses=True):
            # An earlier exception in a forward or backward may have left units whole or running.
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
    def whole_copies(self, model: nn.Module, purpose: str, *, wanted: bool) -> Iterator[dict[str, torch.Tensor]]:
        """If `wanted`, parameters are whole copies in host memory inside the context. Entering is collective.

        State dicts and forwards of the model and its submodules use the copies. Yields the model's state dict; {} if not
        `wanted`.

        Args:
            model: one of the engine's models.
            purpose: name of the call in errors about late ranks.
            wanted: False joins the gathers without keeping copies.
        """
        with self.gathered.use_copies(model, purpose, wanted=wanted) as copies:
            if not wanted:
                yield {}
                return
            addresses = {copy.data_ptr() for copy in copies.values()}
            state = model.state_dict(keep_vars=True)
            # A tied weight has one copy, so that savers recognize it. The copies made above are in host memory and have no other
            # user, so they are not copied again.
            own = {
                id(value): value.detach().to("cpu", copy=value.data_ptr() not in addresses) for value in state.values()
            }
            yield {name: own[id(value)] for name, value in state.items()}

    def hand_back(self, *, wanted: bool) -> None:
        """Turns the model into a plain one, with whole parameters if `wanted`, otherwise on the meta device. Collective.

        With offloaded parameters, which may not fit on the device, parameters and buffers are in host memory afterwards.
        """
        whole: dict[ParameterSlot, torch.Tensor] = {}
        for unit in self.schedule.units:
            self.schedule.unshard([unit])
            if wanted:
                whole.update((slot, slot.parameter.detach().to(self._home, copy=True)) for slot in unit.slots)
            self.schedule.release([unit])
        # Before the new data is set, because hidden parameters refuse new data.
        self._remove()
        if whole:
            move_buffers(self._model, self._home)
        for slot, values in whole.items():
            slot.parameter.data = values
        if self._codes is not None:
            self._codes.end()
        take_out_scales(self._model)
        if not wanted:
            self._move_to_meta()

    def gather_in_pass(self, parameter: nn.Parameter) -> bool:
        """Makes a parameter whole for a read in a forward or backward; False outside of both, where only one rank may read."""
        if not self.schedule.in_pass:
            return False
        self.schedule.before_read(self.unit_of[parameter][0])
        return True

    def edit_own(self, parameter: nn.Parameter, edit: Callable[[torch.Tensor], object]) -> bool:
        """Calls `edit` with a copy of this rank's elements of a sharded parameter, and stores the copy; False inside a pass."""
        unit, slot = self.unit_of[parameter]
        if self.schedule.in_pass or not unit.is_sharded:
            return False
        # Running fetches and secondary copies have the values before the edit.
        self.schedule.forget_copies(unit)
        bucket = slot.bucket
        part = bucket.own_parts.get(slot)
        if part is not None:
            with torch.no_grad():
                own = bucket.memory.own_part(part.in_shard).clone()
                edit(own)
                bucket.memory.write_own_part(part.in_shard, own)
        # On all ranks, even those without elements of the parameter, because versions must be equal on all ranks.
        unit.count_edit(slot)
        self.edits += 1
        return True

    def follow_step(self, stepped_of: Mapping[Bucket, Sequence[ParameterSlot]]) -> None:
        """Passes a step's writes to the buckets' units; see `Unit.follow_step`."""
        for bucket, stepped in stepped_of.items():
            # A parameter on only one rank, for example of an expert, is in no unit.
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
            unit.forms.exchange_dicts_of({})
            unit.forms.followers.clear()
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
                unit.forms.exchange_dicts_of(modules)
        for sharded in found.values():
            if len(sharded.units) > 1:
                for unit in sharded.units:
                    unit.forms.followers.append(sharded.follow_units)
                sharded.follow_units()
        return found

    def _install_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for module, unit in self._layers:
            before = WeakHook(self, partial(ShardedModel._before_layer, unit=unit))
            after = WeakHook(self, partial(ShardedModel._after_layer, unit=unit))
            # Before other hooks that may read the layer's parameters, such as the script's, or bitsandbytes' for its codes.
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            # always_call, because non-reentrant checkpointing ends the recomputed forward by an exception.
            handles.append(module.register_forward_hook(after, always_call=True))
        for module in self._sharded:
            if any(p in self.unit_of and self.unit_of[p][0] is self.root for p in module._parameters.values()):
                # An encoder or embedding may be called directly, without the model's forward.
                hook = WeakHook(self, ShardedModel._before_part_of_root)
                handles.append(module.register_forward_pre_hook(hook, prepend=True))
        return handles

    def _casts_weights_of(self, module: nn.Module) -> bool:
        slots = [self.unit_of[p][1] for p in module._parameters.values() if p in self.unit_of]
        return any(slot.bucket.precision.casts for slot in slots)

    def _is_passed_by(self, unit: Unit, *, refuses: bool = False) -> bool:
        """Whether the hooks ignore a forward. Errors as in `runs_transformed`."""
        # While copies are in use, only one rank may call a submodule, for example a prompt encoder whose output is saved.
        gathered = self.gathered
        return gathered.uses_copies or runs_transformed(unit, is_watched=gathered.watching > 0, refuses=refuses)

    def _before_layer(self, _module: nn.Module, args: tuple, kwargs: dict, unit: Unit) -> None:
        if not (self.gathered.uses_copies or transforms()) or not self._is_passed_by(unit, refuses=True):
            self.schedule.before_forward(unit, (*args, *kwargs.values()))

    def _after_layer(self, _module: nn.Module, _args: tuple, outputs: object, unit: Unit) -> None:
        if not (self.gathered.uses_copies or transforms()) or not self._is_passed_by(unit):
            self.schedule.after_forward(unit, outputs, has_returned=outputs is not None or not _follows_exception())

    def _before_part_of_root(self, _module: nn.Module, _args: tuple) -> None:
        if not self._is_passed_by(self.root, refuses=True):
            self.schedule.before_read(self.root)


def _follows_exception() -> bool:
    """Whether torch calls the calling hook because an exception has ended the forward (`always_call`)."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    # The frame that handles an exception is the first in its traceback. An outer frame may be handling a different exception.
    return trace is not None and trace.tb_frame is caller_of_hook()
