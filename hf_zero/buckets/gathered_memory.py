"""Memory of a bucket at stage 3: a permanent shard, and the whole buffer while a unit is gathered."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from ..allocation import allocate, reserve
from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..layout.buckets import BucketLayout
from ..layout.intervals import Interval
from ..read_ahead import ask_for
from .memory import ParameterMemory, addresses_of, clear_padding, lies_at
from .sharded_parameter import all_are_hidden, are_hidden, hide_all, hide_values, show_all, show_values

Started = TypeVar("Started")


def _mark_of(dtype: torch.dtype) -> float:
    """Returns the mark of absent values: NaN, or the largest integer. Zeros would look like an edit by `zero_()`."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


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
        absent: a scalar with the mark. Hidden parameters are views of it.
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
        self._reservation = reserve(layout.numel, dtype, device, in_flat, separate_own=rounded)
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
        self.absent = torch.full((), self._mark, dtype=dtype, device=self.flat.device)
        self.is_readable = False
        self.read_as: torch.dtype | None = None

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
    def own_view(self) -> torch.Tensor:
        """This rank's part of `shown`."""
        return self.shown[self._shard.start : self._shard.stop] if self.is_shown_exactly else self._own_of_flat

    def gather(self, start: Callable[[], Started], *, exactly: bool) -> Started:
        """Allocates `shown`, and starts the all-gather from each rank's `source` into `shown`.

        Args:
            start: starts the all-gather.
            exactly: gather in the dtype of the shard, if `flat` has another dtype.
        """
        if exactly and self.casts:
            self._make_room(exactly=True)
            return start()
        self.is_readable = True
        self._reservation.restore()
        if self.casts:
            self._own_of_flat.copy_(self._own)
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
            self.own.copy_(self.own_view)

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

    def was_written(self) -> bool:
        """Whether absent parameters were written to. Only known on the host, because a check would stop a device's queue."""
        if self.is_readable or not self._is_on_host:
            return False
        found = self.absent.item()
        # `x == x` is False for NaN, so this tests "no longer NaN".
        return found == found if self._marks_by_nan else found != self._mark

    def clear_padding(self, layout: BucketLayout) -> None:
        clear_padding(self.own, layout, self._shard)

    def store(self, view: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        common = interval.intersect(self._shard)
        if common is not None:
            source = common.shift(-interval.start)
            # Only read this rank's part: the parameter may be a view of a mapped file, whose other pages need not be read.
            values = parameter.reshape(-1)[source.start : source.stop]
            ask_for(values)
            self.write_own_part(common.shift(-self._shard.start), values)

    def end_filling(self) -> None:
        self._reservation.release()

    def set_all_data(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        """Calls `set_data` for all parameters of the bucket, in order."""
        if self.read_as is not None:
            for parameter, view in zip(parameters, views):
                self.set_data(parameter, view)
            return
        with look_only():
            if self.is_readable:
                views = list(map(self._shown_at, views)) if self.is_shown_exactly else views
                set_all(parameters, "data", views)
                show_all(parameters)
                return
            absences = [self.absent.expand(view.shape) for view in views]
            set_all(parameters, "data", absences)
            show_all(parameters)
            hide_all(parameters)

    def set_data(self, parameter: nn.Parameter, view: torch.Tensor) -> None:
        # Show the values first, because a guarded parameter refuses new data, even from the engine.
        show_values(parameter)
        values = self._shown_at(view) if self.is_readable else self.absent
        values = values if self.read_as is None else values.to(self.read_as)
        parameter.data = values.expand(view.shape)
        if not self.is_readable:
            hide_values(parameter)

    def point_at(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Makes a parameter appear in another dtype while not gathered."""
        show_values(parameter)
        parameter.data = self.absent.to(dtype).expand(parameter.shape)
        hide_values(parameter)

    def is_view(self, parameter: nn.Parameter, view: torch.Tensor) -> bool:
        # Only the engine sets data of a parameter with hidden values, and values are hidden until a running gather has ended.
        return are_hidden(parameter) or (self.is_readable and lies_at(parameter, self._shown_at(view)))

    def are_views(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> bool:
        if all_are_hidden(parameters):
            return True
        if self.is_shown_exactly:
            views = list(map(self._shown_at, views))
        return self.is_readable and addresses_of(parameters) == addresses_of(views)

    def _shown_at(self, view: torch.Tensor) -> torch.Tensor:
        """Returns the elements of `shown` for the view `view` of `flat`."""
        if not self.is_shown_exactly:
            return view
        start = view.storage_offset() - self.flat.storage_offset()
        return self.shown[start : start + view.numel()].view(view.shape)
