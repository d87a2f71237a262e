"""Reads and edits of whole parameters at stage 3, during and outside of training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch
from torch import nn

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.sharded_parameter import show_values
from ..comm.all_or_none import first_difference
from ..comm.local import LocalTransport
from ..comm.transport import Transport
from ..comm.waits import Label
from ..device import free_bytes
from ..engine.report_tables import mib
from ..optimizer.replicas import checksums
from ..optimizer.storage import OptimizerStorage
from .edits import Marks, moved
from .transforms import TRANSFORMED
from .unit import Unit
from .unsharding import Unsharding

# ---- Backward nodes with saved whole parameters: the parameters are gathered again when such a node runs ----


@contextmanager
def gathered_again(units: Sequence[Unit], schedule: Unsharding) -> Iterator[None]:
    """Supports computations with whole parameters outside of any forward, whose backward runs when the parameters are sharded.

    An example is a penalty on parameters. Autograd saves the parameter or a view of it, and would read wrong values in backward.
    Layers do not need this context, because hooks on their outputs gather them.

    Args:
        units: the units that are whole now.
        schedule: makes a unit whole during a backward.
    """
    if not units or not torch.is_grad_enabled():
        yield
        return
    # Compare addresses of storages, because autograd may save a view or a transpose of a parameter, which is a different tensor.
    unit_at = {memory.shown.untyped_storage().data_ptr(): unit for unit in units for memory in unit.memories.values()}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int, Unit | None]:
        return tensor, tensor._version, unit_at.get(tensor.untyped_storage().data_ptr())

    def unpack(packed: tuple[torch.Tensor, int, Unit | None]) -> torch.Tensor:
        tensor, version, unit = packed
        if unit is not None:
            # Autograd does not check the versions of tensors packed by a hook.
            if tensor._version != version:
                raise RuntimeError(
                    "hf_zero: one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"parameter of {unit.name!r}, as by optimizer.step(). Run the forward again before this backward."
                )
            schedule.before_saved_read(unit)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        try:
            yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                # torch's error at the begin of a transform of torch.func.
                raise RuntimeError(TRANSFORMED) from error
            raise


# ---- Gathers of sharded parameters outside of forward and backward, to read, edit or save them ----

IN_GATHERED = "wrap the call in `with hf_zero.gathered(model)` on every rank"
"""Advice in errors: how one rank can read a whole model without the other ranks."""


class _Record:
    """The state of parameters at the start of `gathered`, to detect and undo edits without writeback."""

    def __init__(self):
        self._marks: dict[Unit, Marks] = {}
        self._shards: dict[Bucket, torch.Tensor | None] = {}

    def take(self, unit: Unit) -> None:
        self._marks[unit] = Marks(unit.slots)
        self._shards.update((bucket, memory.snapshot()) for bucket, memory in unit.memories.items())

    def renew(self, unit: Unit) -> None:
        """Records the unit's present state, after its edits have been kept."""
        if unit in self._marks:
            self.take(unit)

    def refuse_edits(self) -> None:
        """Raises RuntimeError for an edit without writeback."""
        for marks in self._marks.values():
            for slot in marks.edited():
                raise RuntimeError(
                    f"hf_zero: {slot.name!r} was edited inside `gathered` without writeback=True, and the edit is lost. Use "
                    "hf_zero.gathered(..., writeback=True)."
                )

    def restore(self) -> None:
        """Undoes edits without writeback."""
        for unit, marks in self._marks.items():
            edited = marks.edited()
            for slot in moved(edited):
                unit.set_data(slot)
            if edited:
                # Otherwise the next reshard would treat the refused edit as a forward's edit, and keep the values.
                unit.forget_edits()
        for bucket, shard in self._shards.items():
            # If the shard is a view of the whole values, the edit has changed the shard.
            if shard is not None:
                bucket.own.copy_(shard)


def put_back(slots: Iterable[ParameterSlot], transport: Transport) -> None:
    """Copies new data of parameters into their buckets, and makes the parameters views of the buckets again. Collective.

    Raises:
        RuntimeError: on all ranks, if the new data of any rank has a different shape or dtype.
    """
    given = moved(slots)
    faults = (_unlike(slot) for slot in given if not _is_alike(slot))
    # Agree before raising. Otherwise a wrong shape on one rank would leave the others waiting in the broadcast.
    fault = next(filter(None, transport.exchange(next(faults, None), "edits of parameters")), None)
    if fault is not None:
        raise RuntimeError(fault)
    # Clone all before writing. A script may have exchanged the data of two parameters, so the first write would destroy the
    # second one's data.
    values = [slot.parameter.detach().clone() for slot in given]
    with torch.no_grad():
        for slot, value in zip(given, values):
            slot.bucket.memory.set_data(slot.parameter, slot.view)
            slot.parameter.copy_(value)


def _is_alike(slot: ParameterSlot) -> bool:
    parameter, memory = slot.parameter, slot.bucket.memory
    return (parameter.shape, parameter.dtype) == (slot.view.shape, memory.shown.dtype)


def _unlike(slot: ParameterSlot) -> str:
    parameter, memory = slot.parameter, slot.bucket.memory
    given, own = f"{tuple(parameter.shape)} of {parameter.dtype}", f"{tuple(slot.view.shape)} of {memory.shown.dtype}"
    return (
        f"hf_zero: inside `gathered(writeback=True)` {slot.name!r} was set to {given}, but is {own}. Assign values of its own "
        "shape and dtype, for example with `p.copy_(values)`."
    )


Name = TypeVar("Name")


def _gather_one(slot: ParameterSlot) -> torch.Tensor:
    """Gathers the exact values of only one parameter from the shards. Collective in the shard group."""
    bucket = slot.bucket
    values = torch.empty(slot.view.shape, dtype=bucket.precision.kept, device=bucket.device)
    label = Label(kind="broadcast of a part", subject=slot.name)
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
    """Gathers units outside of forward and backward. Methods are collective unless they say otherwise.

    Args:
        unit_of: the unit and slot of each sharded parameter.
        transport: connects all ranks of the model.
        storage: stores the masters, which follow edits.
        timeout_s: time limit for the other ranks to make the same call.

    Attributes:
        uses_copies: whether parameters have temporary copies as data (`use_copies`) or no values (`without_values`), so the
            model's replaced methods must not gather.
        watching: number of open `gathered` contexts in which computations are supported by `gathered_again`.
    """

    def __init__(
        self,
        unit_of: Mapping[nn.Parameter, tuple[Unit, ParameterSlot]],
        schedule: Unsharding,
        transport: Transport,
        storage: OptimizerStorage,
        device: torch.device,
        timeout_s: float,
    ):
        self._unit_of = unit_of
        self._schedule = schedule
        self._transport = transport
        self._storage = storage
        self._device = device
        self._timeout_s = timeout_s
        self._copies: dict[nn.Parameter, torch.Tensor] = {}
        self._open: list[_Record] = []
        # Attributes, not properties, because the hooks of each layer read both.
        self.uses_copies = False
        self.watching = 0

    def units_of(self, parameters: Iterable[nn.Parameter]) -> list[Unit]:
        """Returns the units of these parameters, each once, in the order of the parameters."""
        return list(dict.fromkeys(self._unit_of[p][0] for p in parameters if p in self._unit_of))

    def forwards_are_collective(self, module: nn.Module) -> bool:
        """Whether a forward of the module gathers from other ranks."""
        is_held = self.are_held(module.parameters())
        return not (isinstance(self._transport, LocalTransport) or self.uses_copies or is_held)

    def are_held(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether these parameters are already whole, inside `gathered`."""
        return all(unit.holds for unit in self.units_of(parameters))

    def one_by_one(
        self, named: Iterable[tuple[Name, nn.Parameter]], purpose: str
    ) -> Iterator[tuple[Name, nn.Parameter]]:
        """Yields parameters; each is whole and exact until the next is requested. Collective; all ranks must iterate to the end.

        Each parameter has separate memory. So if the caller keeps a `p.data`, the data stays valid, and no other parameter's
        memory stays alive.
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
            # Before the new data, because a parameter with hidden values refuses new data.
            show_values(parameter)
            parameter.data = values
            # Drop this reference. Otherwise the values of two parameters would be alive if the caller keeps none.
            del values
            try:
                yield name, parameter
            finally:
                unit.set_data(slot)

    def meet(self, purpose: str, alone: str = "") -> None:
        """Waits until all ranks have made the same call, with a time limit. Arguments and errors as in `Transport.barrier`."""
        self._transport.barrier(purpose, self._timeout_s, alone)

    def refuse_other_values(self, module: nn.Module, state_dict: Mapping[str, object], purpose: str) -> None:
        """Compares a state dict with those of the other ranks before it is loaded. Collective.

        Buffers may differ, because each rank has its own. Values that are the module's own parameters are not compared: torch's
        DCP helpers fill names that are missing in a state with them.

        Raises:
            ValueError: on all ranks, naming the first difference. Otherwise each rank would load its shard of a different model.
        """
        own = {name for name, _ in module.named_buffers()}
        held = {id(parameter) for parameter in module.parameters()}
        tensors = {
            name: value.detach()
            for name, value in state_dict.items()
            if name not in own and isinstance(value, torch.Tensor) and id(value) not in held and not value.is_meta
        }
        sums = checksums(tensors)
        facts = {name: f"{sums[name]:016x} of {tuple(value.shape)}" for name, value in tensors.items()}
        difference = first_difference(
            partial(self._transport.exchange, purpose=f"comparison of values in {purpose}"), facts
        )
        if difference is not None:
            raise ValueError(
                f"hf_zero: {purpose} got different values on the ranks (checksums): {difference}. Load the same state dict on "
                "every rank, or load it on rank 0 inside `hf_zero.gathered(model, writeback=True)`."
            )

    def release(self, units: Iterable[Unit]) -> None:
        """Reshards units left whole by a forward."""
        self._schedule.release(units)

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter], *, writeback: bool) -> Iterator[None]:
        """Makes parameters whole inside, to read and, with `writeback`, to edit them. All ranks then keep rank 0's values.

        Call `meet` before.

        Raises:
            MemoryError: the whole parameters do not fit.
            RuntimeError: a parameter was edited without `writeback`.
        """
        units = self.units_of(parameters)
        self._refuse_unless_they_fit(units)
        for unit in units:
            # Hold the units before the gather. Otherwise a forward inside would drop them.
            unit.holds += 1
        record = _Record()
        self._open.append(record)
        try:
            self._schedule.unshard(units)
            for unit in units:
                record.take(unit)
            self.watching += (watches := bool(units) and torch.is_grad_enabled())
            try:
                with gathered_again(units, self._schedule):
                    yield
            finally:
                self.watching -= watches
            if writeback:
                self._keep_edits(units)
            record.refuse_edits()
        finally:
            self._open.remove(record)
            # Also after an error, because edits without writeback must not reach the shard.
            record.restore()
            for unit in units:
                unit.holds -= 1
            # After the restore, which needs the whole parameters.
            self._schedule.release(units)

    @contextmanager
    def use_copies(self, module: nn.Module, purpose: str, *, wanted: bool = True) -> Iterator[dict]:
        """Makes whole copies in host memory the data of the module's parameters; yields a dict from parameter to copy.

        Gathers one unit at a time. If all units are already whole inside `gathered`, or copies are already in use, nothing is
        gathered and the call is not collective.

        Args:
            wanted: False joins the gathers without keeping copies.
        """
        if self.uses_copies:
            yield self._copies
            return
        parameters = set(module.parameters())
        units = self.units_of(parameters)
        if any(not unit.holds for unit in units):
            self.meet(purpose, IN_GATHERED)
        copies: dict[nn.Parameter, torch.Tensor] = {}
        # Sort by the schedule. The order of a set differs between processes, so ranks would gather different units.
        for unit in sorted(units, key=self._schedule.units.index):
            # One unit at a time: the device never stores more than one whole unit.
            self._schedule.unshard([unit])
            if wanted:
                for slot in unit.slots:
                    if slot.parameter in parameters:
                        # On the host, `to` without copy=True would return the gathered memory, which the release below frees.
                        copies[slot.parameter] = slot.parameter.detach().to("cpu", copy=True)
            self._schedule.release([unit])
        # A script may have set new data inside its own `gathered`, whose end still needs this data.
        held = {parameter: parameter.data for parameter in copies if self._unit_of[parameter][0].holds}
        try:
            for parameter, copy in copies.items():
                show_values(parameter)
                parameter.data = copy
            with self._using(copies):
                yield copies
        finally:
            for parameter in copies:
                unit, slot = self._unit_of[parameter]
                if parameter in held:
                    parameter.data = held[parameter]
                else:
                    unit.set_data(slot)

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Inside, the model's methods return sharded parameters with name, shape, and the dtype in which they are saved.

        Values cannot be read. Not collective.
        """
        absent = [
            (unit, slot)
            for unit, slot in self._unit_of.values()
            if slot.bucket.precision.casts and unit.is_sharded and not self.uses_copies
        ]
        try:
            for unit, slot in absent:
                unit.memories[slot.bucket].point_at(slot.parameter, slot.bucket.precision.kept)
            with nullcontext() if self.uses_copies else self._using({}):
                yield
        finally:
            for unit, slot in absent:
                unit.set_data(slot)

    @contextmanager
    def _using(self, copies: dict[nn.Parameter, torch.Tensor]) -> Iterator[None]:
        self._copies, self.uses_copies = copies, True
        try:
            yield
        finally:
            self._copies, self.uses_copies = {}, False

    def _keep_edits(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for bucket in unit.buckets:
                label = Label(kind="broadcast of edits", subject=bucket.name)
                # Send the whole bucket, because the other ranks do not know the parameters edited on rank 0.
                bucket.group.all_transport.broadcast(bucket.memory.shown, label)
            # After the broadcast, because each rank keeps its shard of rank 0's values.
            unit.keep_edits()
            for bucket in unit.buckets:
                with self._storage.fetched_master(bucket):
                    # Compare values, not versions, because the broadcast also writes on ranks without an edit.
                    bucket.follow_values()
            # Renew the records of outer contexts, too. Otherwise they would treat the edit as one without writeback, and undo it.
            for record in self._open:
                record.renew(unit)

    def _refuse_unless_they_fit(self, units: Iterable[Unit]) -> None:
        needed = sum(unit.exact_bytes for unit in units if unit.is_sharded)
        # The minimum of all ranks, because a rank without memory would fail in the middle of the gathers.
        free = min(self._transport.exchange(free_bytes(self._device)))
        if needed > free:
            raise MemoryError(
                f"hf_zero: whole parameters would take {mib(needed)} MiB on each rank, and {mib(free)} MiB are free. "
                "Gather fewer at a time (hf_zero.gathered(layer)), or call the model without gathering it first."
            )


def parameters_in(target: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters of a module, or one or more parameters, as a list."""
    if isinstance(target, nn.Module):
        return list(target.parameters())
    return [cast(nn.Parameter, target)] if isinstance(target, torch.Tensor) else list(target)
