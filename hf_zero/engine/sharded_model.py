"""A model at stage 3: hooks on its layers, and the dtypes of their inputs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import ParameterSlot
from ..buckets.packed import CodesInPlace, beside_packed, take_out_scales
from ..buckets.sharded import show_values
from ..comm.transport import Transport
from ..config import ZeroConfig
from ..hooks import WeakHook
from ..optimizer.holder import StateHolder
from .buffers import place_buffers
from .gathered import GatheredParameters
from .module_guards import ModuleMethods, ShardedParameters
from .schedule import Unsharding
from .unit import Unit, runs_transformed

# ---- Layer norms with 16-bit weights on the CPU: their inputs are cast to the dtype of the weights ----
#
# Autocast has an accelerator normalise in float32, whatever the dtypes. On the CPU it leaves layer norms alone, and torch
# refuses float32 inputs beside bfloat16 weights.


def cast_norm_inputs(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Hooks before the forwards of the layer and group norms among `modules`; other modules get none."""
    norms = (module for module in modules if isinstance(module, nn.LayerNorm | nn.GroupNorm))
    return [norm.register_forward_pre_hook(_cast_input) for norm in norms]


def _cast_input(norm: nn.Module, args: tuple) -> tuple | None:
    if not args or args[0].dtype != torch.float32 or norm.weight is None or norm.weight.dtype == torch.float32:
        return None
    return args[0].to(norm.weight.dtype), *args[1:]


# A model whose parameters live in units: the units, their hooks, and what the model's own methods do meanwhile.

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
        self._sharded = self._guard_modules()
        self._methods = ModuleMethods(model, self._sharded, self.gathered)
        self._handles = self._install_hooks(layers)
        self._codes = CodesInPlace(model) if self.unit_of else None
        if device.type == "cpu":
            self._handles += cast_norm_inputs(module for module in self._sharded if self._casts_weights_of(module))

    @property
    def is_empty(self) -> bool:
        return not self.unit_of

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
    def lent(self, purpose: str, *, wanted: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Where `wanted`, parameters are whole copies in host memory until the context is left. Collective on the way in.

        The state dicts of the model and of its parts have them, and so do forwards. Yields the model's, {} where not `wanted`.
        """
        with self.gathered.lend_copies(self._model, purpose, wanted=wanted) as copies:
            if not wanted:
                yield {}
                return
            lent = {copy.data_ptr() for copy in copies.values()}
            state = self._model.state_dict(keep_vars=True)
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
        return True

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
                sharded = found[module] = ShardedParameters(module, slots, self.schedule)
                for unit in {unit for unit, _ in slots.values()}:
                    unit.followers.append(sharded.follow_units)
                sharded.follow_units()
        return found

    def _install_hooks(self, layers: Iterable[Unit]) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        of_modules = [(self._model.get_submodule(name), unit) for unit in layers for name in unit.modules]
        for module, unit in of_modules:
            before = WeakHook(self, partial(ShardedModel._before_layer, unit=unit))
            after = WeakHook(self, partial(ShardedModel._after_layer, unit=unit))
            # Before other hooks, some of which read the layer's parameters: bitsandbytes' codes, and a script's own.
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            # Before `after`, which drops the unit unless this look has found that the unit has to stay.
            # Not always_call: a forward that an exception ended has returned nothing.
            look = WeakHook(self, partial(ShardedModel._look_at_outputs, unit=unit))
            handles.append(module.register_forward_hook(look))
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
        return gathered.is_lent or runs_transformed(unit, is_watched=gathered.watching > 0, refuses=refuses)

    def _before_layer(self, _module: nn.Module, args: tuple, kwargs: dict, unit: Unit) -> None:
        if not self._is_passed_by(unit, refuses=True):
            self.schedule.before_forward(unit, (args, kwargs))

    def _after_layer(self, _module: nn.Module, _args: tuple, outputs: object, unit: Unit) -> None:
        if not self._is_passed_by(unit):
            self.schedule.after_forward(unit, outputs)

    def _look_at_outputs(self, _module: nn.Module, _args: tuple, outputs: object, unit: Unit) -> None:
        if not self._is_passed_by(unit):
            self.schedule.look_at_outputs(unit, outputs)

    def _before_part_of_root(self, _module: nn.Module, _args: tuple) -> None:
        if not self._is_passed_by(self.root, refuses=True):
            self.schedule.before_read(self.root)


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
