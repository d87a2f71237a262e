"""The flat memory of a bucket: whole, or a shard of it on the device, in host memory or in a file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ..device import alias, allocate, ask_for, reserve, side_queue
from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..layout.buckets import BucketLayout
from ..layout.intervals import Interval
from ..offload.copies import HostToDevice
from ..offload.shards import ParameterShard, ParameterTier, Region
from .sharded import all_are_hidden, are_hidden, hide_all, hide_values, show_all, show_values

# ---- What lies between and behind the parameters of a flat buffer: zeros ----
#
# Elsewhere than on the host new memory holds anything. A block of a quantised tensor may begin in a parameter and end in
# padding, and has one scale: a NaN in the one would make the other NaN.


def clear_padding(flat: torch.Tensor, layout: BucketLayout, part: Interval | None = None) -> torch.Tensor:
    """Zeros `flat` where it holds no parameter, and returns it.

    Args:
        flat: 1-D, laid out as a bucket, or as the elements `part` of one.
    """
    for gap in layout.padding:
        if part is None:
            flat[gap.start : gap.stop].zero_()
        elif (common := gap.intersect(part)) is not None:
            flat[common.start - part.start : common.stop - part.start].zero_()
    return flat


# Memory of a bucket's parameters: unsharded all the time, or a shard, with a buffer that all-gathers fill for a while.

_DTYPE = attrgetter("dtype")
_Started = TypeVar("_Started")


class ParameterMemory(ABC):
    """The flat buffer of one bucket's parameters.

    Attributes:
        flat: (numel,) of the param dtype.
        shown: (numel,) what parameters are views of while they are whole: `flat`, or shards of another dtype as they are.
        is_readable: whether parameters are whole now.
    """

    flat: torch.Tensor
    shown: torch.Tensor
    is_readable: bool

    @property
    @abstractmethod
    def own(self) -> torch.Tensor:
        """Returns this rank's shard, (shard_numel,); a part of `flat`, or separate memory."""

    @property
    def source(self) -> torch.Tensor:
        """Returns this rank's shard on the training device, for an all-gather."""
        return self.own

    @property
    def writable_own(self) -> torch.Tensor | None:
        """Returns the shard if a step may write new values into it directly; None if `write_own` has more to do."""
        return self.own

    @property
    def is_master(self) -> bool:
        """Whether the shard is the copy that the optimizer updates, although a master is kept apart from `flat`."""
        return False

    @property
    @abstractmethod
    def lasting_bytes(self) -> int:
        """Bytes held all the time."""

    @abstractmethod
    def clear_padding(self, layout: BucketLayout) -> None:
        """Zeroes lasting memory that belongs to no parameter."""

    @abstractmethod
    def store(self, place: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        """Copies a parameter's values to its `place` in `flat`, which are the elements `interval`."""

    def end_filling(self) -> None:  # noqa: B027 (all of it may last)
        """Frees temporary memory, when all parameters are in."""

    def rest(self, master: Region | None) -> None:  # noqa: B027 (the shard may stay on the device)
        """Called when the bucket is built. `master`: where in a file its master lies, in the parameters' own digits."""

    def read_own(self) -> torch.Tensor:
        """The shard's values in memory, wherever they are kept."""
        return self.own

    def write_own(self, values: torch.Tensor, h2d: HostToDevice) -> None:
        """Replaces the shard's values, which the host does not wait for; `h2d` leads here from where they are."""
        h2d.start_copy(self.own, values)

    def write_own_part(self, interval: Interval, values: torch.Tensor) -> None:
        """Replaces elements of the shard."""
        self.own_part(interval).copy_(values)

    def exchange_own(self, values: torch.Tensor) -> None:
        """Puts the shard into another tensor, if it is separate in host memory."""
        raise AssertionError(
            "hf_zero: bug: a shard that is a part of its bucket cannot be exchanged. Open an issue with this traceback."
        )

    def own_part(self, interval: Interval) -> torch.Tensor:
        """Elements of the shard, live, without taking memory for them."""
        return self.own[interval.start : interval.stop]

    @abstractmethod
    def set_data(self, parameter: nn.Parameter, place: torch.Tensor) -> None:
        """Points a parameter at its present data at `place`."""

    @abstractmethod
    def is_view(self, parameter: nn.Parameter, place: torch.Tensor) -> bool:
        """Whether a parameter still has the data that `set_data` gave it."""

    @abstractmethod
    def are_views(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> bool:
        """Whether that is so of all of them, which have elements; False where that is not known at a glance."""


def _lies_at(parameter: torch.Tensor, place: torch.Tensor) -> bool:
    # Of a tensor without elements, the address says nothing.
    is_there = parameter.data_ptr() == place.data_ptr() or parameter.numel() == 0
    return is_there and parameter.dtype == place.dtype


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[list[int], set[torch.dtype]]:
    # Each step asks this of every parameter: in loops of C.
    return list(map(torch.Tensor.data_ptr, tensors)), set(map(_DTYPE, tensors))


class UnshardedMemory(ParameterMemory):
    """Parameters that are never sharded (stages 0 to 2)."""

    is_readable = True

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device, shard: Interval):
        self.shown = self.flat = allocate(layout.numel, dtype, device)
        self._own = self.flat[shard.start : shard.stop]
        # Of the places that were asked for last: `flat` stays where it is.
        self._asked: Sequence[torch.Tensor] = ()
        self._addresses = _addresses(())

    @property
    def own(self) -> torch.Tensor:
        return self._own

    @property
    def lasting_bytes(self) -> int:
        return self.flat.nbytes

    def clear_padding(self, layout: BucketLayout) -> None:
        clear_padding(self.flat, layout)

    def store(self, place: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        ask_for(parameter)
        place.copy_(parameter)

    def set_data(self, parameter: nn.Parameter, place: torch.Tensor) -> None:
        # An alias, not a view: `torch.save` of a view writes the whole bucket, and safetensors takes all views of a bucket for
        # tied weights.
        parameter.data = alias(place)

    def is_view(self, parameter: nn.Parameter, place: torch.Tensor) -> bool:
        return _lies_at(parameter, place)

    def are_views(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> bool:
        if places is not self._asked:
            self._asked, self._addresses = places, _addresses(places)
        return _addresses(parameters) == self._addresses


def _mark_of(dtype: torch.dtype) -> float:
    """Returns what stands for absent values: NaN, or the largest integer. Zeros would be taken for an edit by `zero_()`."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


class _Known(NamedTuple):
    """Parameters, in their order, as `GatheredMemory.set_all_data` has last hidden them.

    Attributes:
        kinds, hidden_kinds: their classes before and after.
        owners, names: the parameters and their attributes, for `setattr`.
        whole, hidden: the values of these attributes.
    """

    kinds: list[type]
    hidden_kinds: list[type]
    owners: list[nn.Parameter]
    names: list[str]
    whole: list[object]
    hidden: list[object]

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        kinds: list[type],
        places: Sequence[torch.Tensor],
        absences: Sequence[torch.Tensor],
    ) -> "_Known":
        hidden_kinds, count = list(map(type, parameters)), len(parameters)
        owners, names = [*parameters, *parameters], ["data"] * count + ["__class__"] * count
        return cls(kinds, hidden_kinds, owners, names, [*places, *kinds], [*absences, *hidden_kinds])


class GatheredMemory(ParameterMemory):
    """Parameters that are unsharded from `gather` to `drop` (stage 3); the shard is on the training device.

    The shard is a part of `flat` where the rest of `flat` can be freed without it. It has memory of its own where gathered
    parameters have other values: blocks leave them fewer digits, or forward and backward read another dtype. Then the shard is
    cast for them, and gathered `exactly`, as it is, to be looked at, edited and saved.

    A parameter that is not gathered keeps its shape, and its values are hidden. What gets at them past Python, as autograd may,
    finds one NaN of stride 0, or the largest integer: that shows in the loss, and cannot crash the process as freed memory would.

    Args:
        dtype: of `flat`, on the training `device`.
        shard: this rank's interval of it.
        kept: dtype of the shard; None where the shard lies elsewhere.
        rounded: what is gathered has other values than the shards.

    Attributes:
        read_as: what parameters are cast to when they are gathered, where that is not the param dtype.
        edits_last: the shard is a part of `flat`, so that edits of that change it at once.
        casts: the shard is of another dtype than `flat`.
        is_fetched: the shard is offloaded.
    """

    is_fetched = False

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        shard: Interval,
        kept: torch.dtype | None,
        *,
        rounded: bool = False,
    ):
        # Only a shard of the dtype of `flat` can be a part of `flat`. For another shard all of `flat` is given back.
        in_flat = slice(shard.start, shard.stop) if kept == dtype else slice(0, 0)
        self._reservation = reserve(layout.numel, dtype, device, in_flat, apart=rounded)
        self._own = self._reservation.own
        if kept not in (None, dtype):
            # Outside of `flat`, which cannot hold the digits of another dtype: a gather casts from here.
            self._own = allocate(layout.shard_numel, kept, device)
        self.edits_last = kept == dtype and self._reservation.in_place
        self.casts = kept not in (None, dtype)
        self._shard = shard
        self.shown = self.flat = self._reservation.flat
        # Cut once: each gather needs this part, and torch makes no view of a storage without memory.
        self._own_of_flat = self.flat[shard.start : shard.stop]
        self._mark = _mark_of(dtype)
        self._marks_by_nan, self._is_on_host = self._mark != self._mark, self.flat.device.type == "cpu"
        self._absent = torch.full((), self._mark, dtype=dtype, device=self.flat.device)
        self.is_readable = False
        self.read_as: torch.dtype | None = None
        self._known = _Known.of((), [], (), ())

    @property
    def own(self) -> torch.Tensor:
        return self._own

    @property
    def source(self) -> torch.Tensor:
        return self._own_of_flat if self.casts and self.shown is self.flat else self._own

    @property
    def lasting_bytes(self) -> int:
        return self.own.nbytes

    @property
    def passing_bytes(self) -> int:
        """Bytes that `gather` takes and `drop` gives back."""
        return self.flat.nbytes - (self.own.nbytes if self.edits_last else 0)

    @property
    def is_shown_exactly(self) -> bool:
        """Whether parameters are whole in the dtype of the shard, which is not that of forward and backward."""
        return self.shown is not self.flat

    @property
    def is_rounded(self) -> bool:
        """Whether parameters are whole with fewer digits than the shard has."""
        return self.casts and not self.is_shown_exactly

    @property
    def exact_bytes(self) -> int:
        """Bytes that an exact `gather` takes."""
        return self.flat.numel() * self.own.itemsize if self.casts else self.passing_bytes

    @property
    def own_place(self) -> torch.Tensor:
        """This rank's part of `shown`."""
        return self.shown[self._shard.start : self._shard.stop] if self.is_shown_exactly else self._own_of_flat

    def gather(self, start: Callable[[], _Started], *, exactly: bool) -> _Started:
        """Gives `shown` memory, and starts the all-gather that fills it from each rank's `source`.

        Args:
            start: starts it.
            exactly: in the dtype of the shard, where `flat` has another.
        """
        self._make_room(exactly=exactly)
        if self.casts and self.shown is self.flat:
            self._own_of_flat.copy_(self._own)
        return start()

    def arrive(self) -> None:
        """Called before that all-gather is finished."""

    def start_fetch(self) -> None:
        """Begins to fetch the shard to the memory that `gather` reads."""

    def forget_fetch(self) -> None:
        """Drops a fetch that was not gathered, and waits for copies from the shard, which is about to be written."""

    def snapshot(self) -> torch.Tensor | None:
        """Copies the shard if edits of `flat` change it at once; None if `drop` forgets them."""
        return self.own.clone() if self.edits_last else None

    def keep_edits(self) -> None:
        """Takes this rank's part of edited whole parameters into the shard."""
        if not self.edits_last:
            # Here `own` lies outside of the gathered memory: without the copy the edit would go with the next `drop`.
            self.own.copy_(self.own_place)

    def _make_room(self, *, exactly: bool) -> None:
        self.is_readable = True
        if exactly and self.casts:
            self.shown = torch.empty(self.flat.numel(), dtype=self.own.dtype, device=self.flat.device)
        else:
            self._reservation.restore()

    def stay(self) -> None:
        """Keeps the gathered parameters for forward and backward, and frees exact ones beside them."""
        self.shown = self.flat

    def drop(self) -> None:
        """Gives back everything but the shard."""
        self.is_readable = False
        self.shown = self.flat
        self._reservation.release()
        # `p.data.zero_()` on an absent parameter would have made it read as 0.
        self._absent.fill_(self._mark)

    def was_written(self) -> bool:
        """Whether absent parameters were written to. Known on the host only: elsewhere it would stop the queue."""
        if self.is_readable or not self._is_on_host:
            return False
        found = self._absent.item()
        # `x == x` is False for NaN, so this tests "no longer NaN".
        return found == found if self._marks_by_nan else found != self._mark

    def clear_padding(self, layout: BucketLayout) -> None:
        clear_padding(self.own, layout, self._shard)

    def store(self, place: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        common = interval.intersect(self._shard)
        if common is not None:
            source = common.shift(-interval.start)
            # Only this rank's part is looked at: a parameter may be a view of a mapped file, of which the other pages stay
            # unread.
            values = parameter.reshape(-1)[source.start : source.stop]
            ask_for(values)
            self.write_own_part(common.shift(-self._shard.start), values)

    def end_filling(self) -> None:
        self._reservation.release()

    def set_all_data(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> None:
        """`set_data` for all of the bucket's, in its order. Each layer comes here four times a step."""
        is_whole = self.is_readable
        if self.read_as is None and self.shown is self.flat:
            known, kinds = self._known, list(map(type, parameters))
            if kinds == (known.hidden_kinds if is_whole else known.kinds):
                # Nearly always: as below, in one loop in C. `setattr` returns None, so `any` goes on to the end.
                # Without torch's question: a guarded parameter refuses new data, the engine's too.
                with look_only():
                    any(map(setattr, known.owners, known.names, known.whole if is_whole else known.hidden))
                return
        if self.read_as is not None:
            for parameter, place in zip(parameters, places):
                self.set_data(parameter, place)
            return
        with look_only():
            if is_whole:
                places = list(map(self._shown_at, places)) if self.is_shown_exactly else places
                set_all(parameters, "data", places)
                show_all(parameters)
                return
            absences = [self._absent.expand(place.shape) for place in places]
            set_all(parameters, "data", absences)
            show_all(parameters)
            kinds = list(map(type, parameters))
            hide_all(parameters)
            self._known = _Known.of(parameters, kinds, places, absences)

    def set_data(self, parameter: nn.Parameter, place: torch.Tensor) -> None:
        # First: a guarded parameter refuses new data, the engine's too.
        show_values(parameter)
        values = self._shown_at(place) if self.is_readable else self._absent
        values = values if self.read_as is None else values.to(self.read_as)
        parameter.data = values.expand(place.shape)
        if not self.is_readable:
            hide_values(parameter)

    def hang_absent(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Lets a parameter that is not gathered be looked at in another dtype."""
        show_values(parameter)
        parameter.data = self._absent.to(dtype).expand(parameter.shape)
        hide_values(parameter)

    def is_view(self, parameter: nn.Parameter, place: torch.Tensor) -> bool:
        # Nobody else gives data to a parameter whose values are hidden, as they are until a gather under way has ended.
        return are_hidden(parameter) or (self.is_readable and _lies_at(parameter, self._shown_at(place)))

    def are_views(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> bool:
        if all_are_hidden(parameters):
            return True
        if self.is_shown_exactly:
            places = list(map(self._shown_at, places))
        return self.is_readable and _addresses(parameters) == _addresses(places)

    def _shown_at(self, place: torch.Tensor) -> torch.Tensor:
        """The elements of `shown` that are at `place` in `flat`."""
        if not self.is_shown_exactly:
            return place
        start = place.storage_offset() - self.flat.storage_offset()
        return self.shown[start : start + place.numel()].view(place.shape)


# ---- Memory of a bucket whose shard of the parameters is offloaded to host memory or a file ----


class OffloadedMemory(GatheredMemory):
    """The shard is offloaded, and is copied to the device for each all-gather.

    Args:
        values: the shard.
    """

    is_fetched = True

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        shard: Interval,
        *,
        values: ParameterShard,
    ):
        super().__init__(layout, dtype, device, shard, kept=None)
        self._values = values
        self.casts = values.values.dtype != dtype
        self._queue = side_queue(device)
        self._copied = self._queue.mark()

    @property
    def own(self) -> torch.Tensor:
        return self._values.values

    @property
    def source(self) -> torch.Tensor:
        return self.own_place

    @property
    def writable_own(self) -> torch.Tensor | None:
        return None

    @property
    def is_master(self) -> bool:
        return self._values.is_master

    def gather(self, start: Callable[[], _Started], *, exactly: bool) -> _Started:
        values = self._values.fetched()
        self._make_room(exactly=exactly)
        # Beside the device's own queue: forward and backward go on while the shard crosses the bus, and so does the all-gather
        # behind it.
        with self._queue.aside():
            if values.dtype != self.source.dtype:
                # Cast where it arrives: a copy between devices that casts would do so on the host, which would wait for it.
                values = values.to(self.flat.device, non_blocking=True)
            self.source.copy_(values, non_blocking=True)
            started = start()
        # Behind the copy and the gather: the shard may not be written, nor the gather finished, before that
        # point.
        self._copied = self._queue.mark()
        return started

    def arrive(self) -> None:
        self._copied.hold_up_device()

    def start_fetch(self) -> None:
        self._values.start_fetch()

    def forget_fetch(self) -> None:
        self._values.forget()
        self._copied.wait()

    def keep_edits(self) -> None:
        self._values.write(self.source)

    def rest(self, master: Region | None) -> None:
        self._values.rest(master)

    def read_own(self) -> torch.Tensor:
        # From a file, where there is one: `own` has only a shape then, and reads as NaN.
        return self._values.fetched()

    def write_own(self, values: torch.Tensor, h2d: HostToDevice) -> None:
        self._values.write(values)

    def exchange_own(self, values: torch.Tensor) -> None:
        self._values.values = values

    def own_part(self, interval: Interval) -> torch.Tensor:
        return self._values.part(interval)

    def write_own_part(self, interval: Interval, values: torch.Tensor) -> None:
        self._values.write_part(interval, values)


def sharded_memory(
    layout: BucketLayout,
    dtype: torch.dtype,
    device: torch.device,
    shard: Interval,
    kept: torch.dtype,
    *,
    tier: ParameterTier,
    rounded: bool,
) -> GatheredMemory:
    """Memory for a bucket whose shard is to live in `tier`.

    Args:
        dtype: of the parameters, on the training `device`.
        shard: this rank's interval, of the dtype `kept`.
        rounded: what is gathered has other values than the shards.
    """
    values = tier.shard(f"bucket {layout.index}", layout.shard_numel, kept)
    if values is not None:
        return OffloadedMemory(layout, dtype, device, shard, values=values)
    return GatheredMemory(layout, dtype, device, shard, kept, rounded=rounded and kept == dtype)
