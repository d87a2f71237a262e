"""Reads and edits of whole parameters at stage 3, in and out of training."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch
from torch import nn

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.sharded import show_values
from ..comm.all_or_none import first_difference
from ..comm.ledger import Label
from ..comm.transport import LocalTransport, Transport
from ..device import free_bytes
from ..engine.report_tables import mib
from ..optimizer.holder import StateHolder
from ..optimizer.replicas import checksums
from .unit import TRANSFORMED, Unit, is_cast
from .unsharding import Unsharding

# ---- Backward nodes that have saved whole parameters: the parameters are gathered again when such a node runs ----


@contextmanager
def gathered_again(units: Sequence[Unit], gather: Callable[[Unit], None]) -> Iterator[None]:
    """For code that computes with whole parameters outside of any forward, and whose backward comes when they are sharded.

    Such as a penalty on parameters. Autograd keeps the parameter, or a view of it, and would read what stands in its place by
    then. Layers announce their backward by themselves.

    Args:
        units: whole for now.
        gather: makes one whole during a backward.
    """
    if not units or not torch.is_grad_enabled():
        yield
        return
    # By the address of the storage: autograd may save a view or a transpose of a parameter, which is another tensor.
    unit_at = {memory.shown.untyped_storage().data_ptr(): unit for unit in units for memory in unit.memories.values()}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int, Unit | None]:
        return tensor, tensor._version, unit_at.get(tensor.untyped_storage().data_ptr())

    def unpack(packed: tuple[torch.Tensor, int, Unit | None]) -> torch.Tensor:
        tensor, version, unit = packed
        if unit is not None:
            # autograd does not check what a hook has packed.
            if tensor._version != version:
                raise RuntimeError(
                    "hf_zero: one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"parameter of {unit.name!r}, as by optimizer.step(). Run the forward again before this backward."
                )
            gather(unit)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        try:
            yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                # torch's own words, which begin a transform of torch.func.
                raise RuntimeError(TRANSFORMED) from error
            raise


# ---- Gathers sharded parameters outside of forward and backward: to read, to edit, to save ----

IN_GATHERED = "wrap the call in `with hf_zero.gathered(model)` on every rank"
"""What lets one rank read a whole model by itself, in words."""


class _Record:
    """Parameters as `gathered` found them, so that an edit that is not to be kept is seen and undone."""

    def __init__(self):
        self._versions: dict[ParameterSlot, int] = {}
        self._moved: set[ParameterSlot] = set()
        self._units: set[Unit] = set()
        self._shards: dict[Bucket, torch.Tensor | None] = {}

    def take(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._units.add(unit)
            self._versions.update((slot, slot.parameter._version) for slot in unit.slots)
            # Data that was moved before the context began is no edit of this context.
            self._moved.difference_update(unit.slots)
            self._moved.update(moved_slots(unit.slots))
            self._shards.update((bucket, memory.snapshot()) for bucket, memory in unit.memories.items())

    def renew(self, unit: Unit) -> None:
        """Records the unit's present values: its edits have been kept."""
        if unit.slots and unit.slots[0] in self._versions:
            self.take([unit])

    def refuse_edits(self) -> None:
        """Raises for an edit that has not been kept."""
        for slot in self._versions:
            if self._is_edited(slot):
                raise RuntimeError(
                    f"hf_zero: {slot.name!r} was edited inside `gathered` without writeback=True, and the edit is lost. Use "
                    "hf_zero.gathered(..., writeback=True)."
                )

    def restore(self) -> None:
        """Undoes edits that have not been kept."""
        for unit in self._units:
            edited = [slot for slot in unit.slots if self._is_edited(slot)]
            for slot in moved_slots(edited):
                unit.set_data(slot)
            if edited:
                # Otherwise the next reshard would take the refused edit for one of a forward, and keep the values.
                unit.forget_edits()
        for bucket, shard in self._shards.items():
            # Of shards that are a part of the whole values: the edit has changed them in place.
            if shard is not None:
                bucket.own.copy_(shard)

    def _is_edited(self, slot: ParameterSlot) -> bool:
        is_moved = slot not in self._moved and any(moved_slots([slot])) and not is_cast(slot)
        return is_moved or slot.parameter._version != self._versions[slot]


def moved_slots(slots: Iterable[ParameterSlot]) -> list[ParameterSlot]:
    """Those whose parameter a script has given other data (`p.data = ...`, `p.set_(...)`, `vector_to_parameters`)."""
    # An evaluation in another dtype gives whole parameters memory of their own.
    in_buckets = (slot for slot in slots if getattr(slot.bucket.memory, "read_as", None) is None)
    return [slot for slot in in_buckets if not slot.bucket.is_exact_view(slot)]


def put_back(slots: Iterable[ParameterSlot], transport: Transport) -> None:
    """Writes a script's new data of parameters into their buckets, and makes the parameters views again. Collective.

    Raises:
        RuntimeError: on all ranks, where some rank gave one another shape or dtype.
    """
    moved = moved_slots(slots)
    faults = (_unlike(slot) for slot in moved if not _is_alike(slot))
    # Agreement before raise: a wrong shape on one rank must not leave the others in the broadcast.
    fault = next(filter(None, transport.exchange(next(faults, None), "edits of parameters")), None)
    if fault is not None:
        raise RuntimeError(fault)
    # Copies first: a script may have exchanged the data of two parameters, and the first write would destroy the second's.
    values = [slot.parameter.detach().clone() for slot in moved]
    with torch.no_grad():
        for slot, value in zip(moved, values):
            slot.bucket.memory.set_data(slot.parameter, slot.view)
            slot.parameter.copy_(value)


def _is_alike(slot: ParameterSlot) -> bool:
    parameter, memory = slot.parameter, slot.bucket.memory
    return (parameter.shape, parameter.dtype) == (slot.view.shape, memory.shown.dtype)


def _unlike(slot: ParameterSlot) -> str:
    parameter, memory = slot.parameter, slot.bucket.memory
    given, own = f"{tuple(parameter.shape)} of {parameter.dtype}", f"{tuple(slot.view.shape)} of {memory.shown.dtype}"
    return (
        f"hf_zero: inside `gathered(writeback=True)` {slot.name!r} was given {given}, and is {own}. Give it values of its own "
        "shape and dtype, as `p.copy_(values)` does."
    )


Name = TypeVar("Name")


def _gather_one(slot: ParameterSlot) -> torch.Tensor:
    """Gathers one parameter's exact values, and no more than these, from the shards. Collective in the shard group."""
    bucket = slot.bucket
    values = torch.empty(slot.view.shape, dtype=bucket.precision.kept, device=bucket.device)
    label = Label(kind="broadcast a part of one parameter", subject=slot.name)
    for rank in range(bucket.group.groups.shard_size):
        common = slot.interval.intersect(bucket.layout.shard(rank))
        if common is None:
            continue
        run = common.shift(-slot.interval.start)
        part = values.view(-1)[run.start : run.stop]
        if rank == bucket.group.groups.shard_rank:
            part.copy_(bucket.memory.own_part(common.shift(-bucket.own_interval.start)))
        bucket.group.transport.broadcast(part, label, rank)
    return values


class GatheredParameters:
    """Gathers units outside of forward and backward. Every method is collective.

    Args:
        unit_of: the unit of each sharded parameter, with its slot.
        transport: between all ranks that come.
        holder: has the masters, which follow edits.
        timeout_s: how long ranks that come wait for those that do not.

    Attributes:
        is_lent: the model's own methods take parameters for what they are just now.
        watching: open `gathered` contexts whose parameters are gathered again for the backward of a computation inside.
    """

    def __init__(
        self,
        unit_of: Mapping[nn.Parameter, tuple[Unit, ParameterSlot]],
        schedule: Unsharding,
        transport: Transport,
        holder: StateHolder,
        device: torch.device,
        timeout_s: float,
    ):
        self._unit_of = unit_of
        self._schedule = schedule
        self._transport = transport
        self._holder = holder
        self._device = device
        self._timeout_s = timeout_s
        self._lent: dict[nn.Parameter, torch.Tensor] = {}
        self._open: list[_Record] = []
        # Attributes and no properties: each layer's hooks look at both.
        self.is_lent = False
        self.watching = 0

    def units_of(self, parameters: Iterable[nn.Parameter]) -> list[Unit]:
        """The units of these parameters, each once, in the order of the parameters."""
        return list(dict.fromkeys(self._unit_of[p][0] for p in parameters if p in self._unit_of))

    def forwards_are_collective(self, module: nn.Module) -> bool:
        """Whether a forward of the module gathers from other ranks."""
        is_held = self.are_held(module.parameters())
        return not (isinstance(self._transport, LocalTransport) or self.is_lent or is_held)

    def are_held(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether `gathered` has these parameters whole already."""
        return all(unit.holds for unit in self.units_of(parameters))

    def one_by_one(
        self, named: Iterable[tuple[Name, nn.Parameter]], purpose: str
    ) -> Iterator[tuple[Name, nn.Parameter]]:
        """Yields parameters, each whole and exact until the next is asked for. Collective: all ranks go on to the end.

        Each has memory of its own meanwhile: a `p.data` that the caller keeps stays valid, and keeps no other parameter's memory.
        """
        named = list(named)
        if not self.are_held(parameter for _, parameter in named):
            self.meet(purpose, IN_GATHERED)
            self._schedule.catch_up()
        for name, parameter in named:
            unit, slot = self._unit_of.get(parameter, (None, None))
            if unit is None or slot is None or unit.holds:
                yield name, parameter
                continue
            values = _gather_one(slot)
            # First: a parameter whose values are hidden refuses other data.
            show_values(parameter)
            parameter.data = values
            # The caller alone decides how long there are two of them.
            del values
            try:
                yield name, parameter
            finally:
                unit.set_data(slot)

    def meet(self, purpose: str, alone: str = "") -> None:
        """Waits until all ranks have made the same call, at most `comm.late_s`. Args, errors: as of `Transport.barrier`."""
        self._transport.barrier(purpose, self._timeout_s, alone)

    def refuse_other_values(self, module: nn.Module, state_dict: Mapping[str, object], purpose: str) -> None:
        """Compares a state dict that is about to be loaded with those of the other ranks. Collective.

        Buffers may differ: each rank has its own.

        Raises:
            ValueError: on all ranks, naming the first difference. Each rank would load its shard of a different model.
        """
        own = {name for name, _ in module.named_buffers()}
        tensors = {
            name: value.detach()
            for name, value in state_dict.items()
            if name not in own and isinstance(value, torch.Tensor) and not value.is_meta
        }
        sums = checksums(tensors)
        facts = {name: f"{sums[name]:016x} of {tuple(value.shape)}" for name, value in tensors.items()}
        difference = first_difference(
            partial(self._transport.exchange, purpose=f"comparison of values in {purpose}"), facts
        )
        if difference is not None:
            raise ValueError(
                f"hf_zero: {purpose} was given different values (checksums): {difference}. Load the same state dict on every "
                "rank, or load it on rank 0 inside `hf_zero.gathered(model, writeback=True)`."
            )

    def release(self, units: Iterable[Unit]) -> None:
        """Reshards units that a forward has left whole."""
        self._schedule.release(units)

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter], *, writeback: bool) -> Iterator[None]:
        """Lends whole parameters to read and, with `writeback`, to edit; all ranks then keep rank 0's values.

        The ranks have met: see `meet`.

        Raises:
            MemoryError: they do not fit.
            RuntimeError: a parameter was edited without `writeback`.
        """
        units = self.units_of(parameters)
        self._refuse_unless_they_fit(units)
        for unit in units:
            # Before the gather: a forward inside must not drop what the script has asked for.
            unit.holds += 1
        record = _Record()
        self._open.append(record)
        try:
            self._schedule.unshard(units)
            record.take(units)
            self.watching += (watches := bool(units) and torch.is_grad_enabled())
            try:
                with gathered_again(units, self._schedule.before_saved_read):
                    yield
            finally:
                self.watching -= watches
            if writeback:
                self._keep_edits(units)
            record.refuse_edits()
        finally:
            self._open.remove(record)
            # Also after an error: an edit that was not kept must not reach the shard.
            record.restore()
            for unit in units:
                unit.holds -= 1
            # Behind the restore, which needs the whole parameters.
            self._schedule.release(units)

    @contextmanager
    def lend_copies(self, module: nn.Module, purpose: str, *, wanted: bool = True) -> Iterator[dict]:
        """Gives the module's parameters whole copies in host memory as their data; yields parameter → copy.

        One unit at a time is gathered. Nothing is gathered, and no rank needs to come along, when all the units are held
        by `gathered` already, or copies are lent.

        Args:
            wanted: False takes part in the gathers without keeping copies.
        """
        if self.is_lent:
            yield self._lent
            return
        parameters = set(module.parameters())
        units = self.units_of(parameters)
        if any(not unit.holds for unit in units):
            self.meet(purpose, IN_GATHERED)
        copies: dict[nn.Parameter, torch.Tensor] = {}
        # In the schedule's order: a set has another order in each process, and ranks would gather different units.
        for unit in sorted(units, key=self._schedule.units.index):
            # One unit at a time: the device never holds more than one that is whole.
            self._schedule.unshard([unit])
            if wanted:
                for slot in unit.slots:
                    if slot.parameter in parameters:
                        # copy=True: on the host, `to` would return the gathered memory, which the release below takes away.
                        copies[slot.parameter] = slot.parameter.detach().to("cpu", copy=True)
            self._schedule.release([unit])
        # A script may have given those that are whole other data, and the end of its `gathered` is still to come.
        held = {parameter: parameter.data for parameter in copies if self._unit_of[parameter][0].holds}
        try:
            for parameter, copy in copies.items():
                show_values(parameter)
                parameter.data = copy
            with self._lending(copies):
                yield copies
        finally:
            for parameter in copies:
                unit, slot = self._unit_of[parameter]
                if parameter in held:
                    parameter.data = held[parameter]
                else:
                    unit.set_data(slot)

    @contextmanager
    def lend_names(self) -> Iterator[None]:
        """Has the model's own methods hand out sharded parameters by name, shape and the dtype that they are saved in.

        Values cannot be read. Not collective.
        """
        absent = [
            (unit, slot)
            for unit, slot in self._unit_of.values()
            if slot.bucket.precision.casts and unit.is_sharded and not self.is_lent
        ]
        try:
            for unit, slot in absent:
                unit.memories[slot.bucket].hang_absent(slot.parameter, slot.bucket.precision.kept)
            with nullcontext() if self.is_lent else self._lending({}):
                yield
        finally:
            for unit, slot in absent:
                unit.set_data(slot)

    @contextmanager
    def _lending(self, copies: dict[nn.Parameter, torch.Tensor]) -> Iterator[None]:
        self._lent, self.is_lent = copies, True
        try:
            yield
        finally:
            self._lent, self.is_lent = {}, False

    def _keep_edits(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for bucket in unit.buckets:
                label = Label(kind="broadcast edits", subject=bucket.name)
                # All of the bucket, edited or not: the other ranks do not know which parameters rank 0's script has written to.
                bucket.group.all_transport.broadcast(bucket.memory.shown, label)
            # Behind the broadcast: each rank keeps its shard of rank 0's values.
            unit.keep_edits()
            for bucket in unit.buckets:
                with self._holder.fetched_master(bucket):
                    # By values, not versions: a broadcast writes on ranks where the script has not.
                    bucket.follow_values()
            # In contexts around this one, too: they would take the kept edit for one without writeback, and undo the edit.
            for record in self._open:
                record.renew(unit)

    def _refuse_unless_they_fit(self, units: Iterable[Unit]) -> None:
        needed = sum(unit.exact_bytes for unit in units if unit.is_sharded)
        # The least of all ranks: one without room would fail in the middle of the gathers.
        free = min(self._transport.exchange(free_bytes(self._device)))
        if needed > free:
            raise MemoryError(
                f"hf_zero: whole parameters would take {mib(needed)} MiB on each rank, and {mib(free)} MiB are free. "
                "Gather fewer at a time (hf_zero.gathered(layer)), or call the model without gathering it first."
            )


def parameters_in(target: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of a module, a parameter or several, as a list."""
    if isinstance(target, nn.Module):
        return list(target.parameters())
    return [cast(nn.Parameter, target)] if isinstance(target, torch.Tensor) else list(target)
