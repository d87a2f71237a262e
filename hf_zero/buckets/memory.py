"""The flat memory of a bucket: whole, or a shard of the bucket on the device, in host memory or in a file."""

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

# ---- Padding between and after the parameters of a flat buffer: zeros ----
#
# Except on the host, new memory has arbitrary contents. A block of a quantised tensor may begin in a parameter and end in
# padding, and has a single scale, so a NaN in the padding would make the parameter's elements NaN.


def clear_padding(flat: torch.Tensor, layout: BucketLayout, part: Interval | None = None) -> torch.Tensor:
    """Sets the padding of `flat` to zero, and returns `flat`.

    Args:
        flat: 1-D, with the layout of a bucket, or of the elements `part` of a bucket.
    """
    for gap in layout.padding:
        if part is None:
            flat[gap.start : gap.stop].zero_()
        elif (common := gap.intersect(part)) is not None:
            flat[common.start - part.start : common.stop - part.start].zero_()
    return flat


# Memory of a bucket's parameters: always unsharded, or a shard and a buffer filled temporarily by all-gathers.

_DTYPE = attrgetter("dtype")
_Started = TypeVar("_Started")


class ParameterMemory(ABC):
    """The flat buffer of one bucket's parameters.

    Attributes:
        flat: (numel,) of the parameter dtype.
        shown: (numel,), the tensor of whose views whole parameters consist: `flat`, or exact shards of another dtype.
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
        """Returns the shard if a step may write new values directly; None if `write_own` is needed."""
        return self.own

    @property
    def is_master(self) -> bool:
        """Whether the optimizer updates the shard itself, although a master is separate from `flat`."""
        return False

    @property
    @abstractmethod
    def lasting_bytes(self) -> int:
        """Bytes of permanent memory."""

    @abstractmethod
    def clear_padding(self, layout: BucketLayout) -> None:
        """Sets the padding in permanent memory to zero."""

    @abstractmethod
    def store(self, place: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        """Copies a parameter's values to its view `place` of `flat`, the elements `interval`."""

    def end_filling(self) -> None:  # noqa: B027 (all of it may last)
        """Frees temporary memory after all parameters were stored."""

    def rest(self, master: Region | None) -> None:  # noqa: B027 (the shard may stay on the device)
        """Called when the bucket is complete. `master`: the region of its master in a file, in the parameters' own dtype."""

    def read_own(self) -> torch.Tensor:
        """Returns the shard's values in memory, reading a file if necessary."""
        return self.own

    def write_own(self, values: torch.Tensor, h2d: HostToDevice) -> None:
        """Replaces the shard's values without blocking the host; `h2d` copies from the memory of `values`."""
        h2d.start_copy(self.own, values)

    def write_own_part(self, interval: Interval, values: torch.Tensor) -> None:
        """Replaces elements of the shard."""
        self.own_part(interval).copy_(values)

    def own_part(self, interval: Interval) -> torch.Tensor:
        """Returns live elements of the shard, without allocating memory."""
        return self.own[interval.start : interval.stop]

    @abstractmethod
    def set_data(self, parameter: nn.Parameter, place: torch.Tensor) -> None:
        """Sets a parameter's data to the current data of its view `place`."""

    @abstractmethod
    def is_view(self, parameter: nn.Parameter, place: torch.Tensor) -> bool:
        """Whether a parameter still has the data set by `set_data`."""

    @abstractmethod
    def are_views(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> bool:
        """Whether this is true for all parameters, which must have elements. May return False if the fast check fails."""


def _lies_at(parameter: torch.Tensor, place: torch.Tensor) -> bool:
    # A tensor without elements has a meaningless address.
    is_there = parameter.data_ptr() == place.data_ptr() or parameter.numel() == 0
    return is_there and parameter.dtype == place.dtype


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[list[int], set[torch.dtype]]:
    # Use loops in C, because each step calls this for every parameter.
    return list(map(torch.Tensor.data_ptr, tensors)), set(map(_DTYPE, tensors))


class UnshardedMemory(ParameterMemory):
    """Parameters without sharding (stages 0 to 2)."""

    is_readable = True

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device, shard: Interval):
        self.shown = self.flat = allocate(layout.numel, dtype, device)
        self._own = self.flat[shard.start : shard.stop]
        # Caches the addresses of the last `places`; valid because `flat` never moves.
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
        # Use an alias instead of a view: `torch.save` of a view would write the whole bucket, and safetensors would treat all
        # views of a bucket as tied weights.
        parameter.data = alias(place)

    def is_view(self, parameter: nn.Parameter, place: torch.Tensor) -> bool:
        return _lies_at(parameter, place)

    def are_views(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> bool:
        if places is not self._asked:
            self._asked, self._addresses = places, _addresses(places)
        return _addresses(parameters) == self._addresses


def _mark_of(dtype: torch.dtype) -> float:
    """Returns the mark of absent values: NaN, or the largest integer. Zeros would look like an edit by `zero_()`."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


class _Known(NamedTuple):
    """The parameters of the last call of `GatheredMemory.set_all_data` that hid them, in order.

    Attributes:
        kinds, hidden_kinds: their classes before and afterwards.
        shows, hides: the arguments of a loop of `setattr` that makes them whole, or hides them: parameters, names, values. A
            guarded parameter refuses new data, so it has its plain class first when it becomes whole, and last when it is hidden.
    """

    kinds: list[type]
    hidden_kinds: list[type]
    shows: tuple[list[nn.Parameter], list[str], list[object]]
    hides: tuple[list[nn.Parameter], list[str], list[object]]

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        kinds: list[type],
        places: Sequence[torch.Tensor],
        absences: Sequence[torch.Tensor],
    ) -> "_Known":
        hidden_kinds, count = list(map(type, parameters)), len(parameters)
        owners, data, classes = [*parameters, *parameters], ["data"] * count, ["__class__"] * count
        shows = owners, [*classes, *data], [*kinds, *places]
        return cls(kinds, hidden_kinds, shows, (owners, [*data, *classes], [*absences, *hidden_kinds]))


class GatheredMemory(ParameterMemory):
    """Parameters unsharded from `gather` to `drop` (stage 3). The shard is on the training device.

    The shard is a part of `flat` if the other parts of `flat` can be freed separately. The shard has separate memory if gathered
    parameters have other values: either blocks store fewer digits, or forward and backward use another dtype. Then the shard is
    cast for them, and is gathered `exactly`, without a cast, for reads, edits and saves.

    A parameter that is not gathered keeps its shape, and its values are hidden. Code that bypasses Python, as autograd may, reads
    a single NaN with stride 0, or the largest integer. This shows in the loss, and cannot crash the process like freed memory.

    Args:
        dtype: the dtype of `flat`, on the training `device`.
        shard: this rank's interval of `flat`.
        kept: the dtype of the shard; None if the shard is stored elsewhere.
        rounded: whether gathered values differ from the shards.

    Attributes:
        read_as: a dtype to which gathered parameters are cast; None for the parameter dtype.
        edits_last: whether the shard is a part of `flat`, so that edits of `flat` change the shard at once.
        casts: whether the shard has another dtype than `flat`.
        is_fetched: whether the shard is offloaded.
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
        # Only a shard with the dtype of `flat` can be a part of `flat`. Otherwise all of `flat` is freed.
        in_flat = slice(shard.start, shard.stop) if kept == dtype else slice(0, 0)
        self._reservation = reserve(layout.numel, dtype, device, in_flat, apart=rounded)
        self._own = self._reservation.own
        if kept not in (None, dtype):
            # Use separate memory, because `flat` cannot store another dtype. A gather casts from here.
            self._own = allocate(layout.shard_numel, kept, device)
        self.edits_last = kept == dtype and self._reservation.in_place
        self.casts = kept not in (None, dtype)
        self._shard = shard
        self.shown = self.flat = self._reservation.flat
        # Make this view once: each gather needs this part, and torch cannot make views of a storage without memory.
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
        """Bytes allocated by `gather` and freed by `drop`."""
        return self.flat.nbytes - (self.own.nbytes if self.edits_last else 0)

    @property
    def is_shown_exactly(self) -> bool:
        """Whether parameters are whole in the dtype of the shard, which differs from the dtype of forward and backward."""
        return self.shown is not self.flat

    @property
    def is_rounded(self) -> bool:
        """Whether whole parameters have fewer digits than the shard."""
        return self.casts and not self.is_shown_exactly

    @property
    def exact_bytes(self) -> int:
        """Bytes allocated by an exact `gather`."""
        return self.flat.numel() * self.own.itemsize if self.casts else self.passing_bytes

    @property
    def own_place(self) -> torch.Tensor:
        """This rank's part of `shown`."""
        return self.shown[self._shard.start : self._shard.stop] if self.is_shown_exactly else self._own_of_flat

    def gather(self, start: Callable[[], _Started], *, exactly: bool) -> _Started:
        """Allocates `shown`, and starts the all-gather from each rank's `source` into `shown`.

        Args:
            start: starts the all-gather.
            exactly: gather in the dtype of the shard, if `flat` has another dtype.
        """
        if self.casts:
            self._make_room(exactly=exactly)
            if self.shown is self.flat:
                self._own_of_flat.copy_(self._own)
        else:
            self.is_readable = True
            self._reservation.restore()
        return start()

    def arrive(self) -> None:
        """Called before the all-gather is finished."""

    def start_fetch(self) -> None:
        """Starts to fetch the shard into the memory used by `gather`."""

    def forget_fetch(self) -> None:
        """Drops an unused fetch, and waits for copies from the shard, which is written next."""

    def snapshot(self) -> torch.Tensor | None:
        """Copies the shard if edits of `flat` change the shard at once; returns None if `drop` discards edits."""
        return self.own.clone() if self.edits_last else None

    def keep_edits(self) -> None:
        """Copies this rank's part of edited whole parameters into the shard."""
        if not self.edits_last:
            # `own` is outside of the gathered memory, so without the copy the next `drop` would discard the edit.
            self.own.copy_(self.own_place)

    def _make_room(self, *, exactly: bool) -> None:
        self.is_readable = True
        if exactly and self.casts:
            self.shown = torch.empty(self.flat.numel(), dtype=self.own.dtype, device=self.flat.device)
        else:
            self._reservation.restore()

    def stay(self) -> None:
        """Keeps the gathered parameters for forward and backward, and frees exact ones."""
        self.shown = self.flat

    def drop(self) -> None:
        """Frees everything except the shard."""
        self.is_readable = False
        self.shown = self.flat
        self._reservation.release()
        # `p.data.zero_()` on an absent parameter may have changed its mark to 0.
        self._absent.fill_(self._mark)

    def was_written(self) -> bool:
        """Whether absent parameters were written to. Only known on the host, because a check would stop a device's queue."""
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
            # Only read this rank's part: the parameter may be a view of a mapped file, whose other pages need not be read.
            values = parameter.reshape(-1)[source.start : source.stop]
            ask_for(values)
            self.write_own_part(common.shift(-self._shard.start), values)

    def end_filling(self) -> None:
        self._reservation.release()

    def set_all_data(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> None:
        """Calls `set_data` for all parameters of the bucket, in order. Must be fast: runs four times per layer and step."""
        is_whole = self.is_readable
        if self.read_as is None and self.shown is self.flat:
            known = self._known
            before, sets = (known.hidden_kinds, known.shows) if is_whole else (known.kinds, known.hides)
            if list(map(type, parameters)) == before:
                # The usual case does the same as the code below in one loop in C. `setattr` returns None, so `any` runs to the
                # end.
                any(map(setattr, *sets))
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
        # Show the values first, because a guarded parameter refuses new data, even from the engine.
        show_values(parameter)
        values = self._shown_at(place) if self.is_readable else self._absent
        values = values if self.read_as is None else values.to(self.read_as)
        parameter.data = values.expand(place.shape)
        if not self.is_readable:
            hide_values(parameter)

    def hang_absent(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Makes a parameter appear in another dtype while not gathered."""
        show_values(parameter)
        parameter.data = self._absent.to(dtype).expand(parameter.shape)
        hide_values(parameter)

    def is_view(self, parameter: nn.Parameter, place: torch.Tensor) -> bool:
        # Only the engine sets data of a parameter with hidden values, and values are hidden until a running gather has ended.
        return are_hidden(parameter) or (self.is_readable and _lies_at(parameter, self._shown_at(place)))

    def are_views(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor]) -> bool:
        if all_are_hidden(parameters):
            return True
        if self.is_shown_exactly:
            places = list(map(self._shown_at, places))
        return self.is_readable and _addresses(parameters) == _addresses(places)

    def _shown_at(self, place: torch.Tensor) -> torch.Tensor:
        """Returns the elements of `shown` for the view `place` of `flat`."""
        if not self.is_shown_exactly:
            return place
        start = place.storage_offset() - self.flat.storage_offset()
        return self.shown[start : start + place.numel()].view(place.shape)


# ---- Memory of a bucket whose parameter shard is offloaded to host memory or a file ----


class OffloadedMemory(GatheredMemory):
    """An offloaded shard, which is copied to the device for each all-gather.

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
        # Use the side queue: forward and backward continue while the shard crosses the bus, and during the all-gather after the
        # copy.
        with self._queue.aside():
            if values.dtype != self.source.dtype:
                # Cast on the device: a cast in a copy between devices would run on the host, and block the host.
                values = values.to(self.flat.device, non_blocking=True)
            self.source.copy_(values, non_blocking=True)
            started = start()
        # Mark the end of copy and gather: before this point, the shard must not be written, and the gather is not finished.
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
        # Read a file if there is one, because `own` then only has a shape, and reads as NaN.
        return self._values.fetched()

    def write_own(self, values: torch.Tensor, h2d: HostToDevice) -> None:
        self._values.write(values)

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
    """Returns the memory for a bucket with a shard in `tier`.

    Args:
        dtype: dtype of the parameters, on the training `device`.
        shard: this rank's interval, of the dtype `kept`.
        rounded: whether gathered values differ from the shards.
    """
    values = tier.shard(f"bucket {layout.index}", layout.shard_numel, kept)
    if values is not None:
        return OffloadedMemory(layout, dtype, device, shard, values=values)
    return GatheredMemory(layout, dtype, device, shard, kept, rounded=rounded and kept == dtype)
