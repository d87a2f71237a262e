"""The flat memory of a bucket, and its form below stage 3: the whole bucket on the device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from ..allocation import allocate
from ..device import alias
from ..layout.buckets import BucketLayout
from ..layout.intervals import Interval
from ..offload.copies import HostToDevice
from ..offload.shards import Region
from ..read_ahead import ask_for

# Except on the host, new memory has arbitrary contents. A block of a quantized tensor may begin in a parameter and end in
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
    def store(self, view: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        """Copies a parameter's values to `view`, a view of `flat`, the elements `interval`."""

    def end_filling(self) -> None:  # noqa: B027 (all of it may last)
        """Frees temporary memory after all parameters were stored."""

    def move_to_tier(self, master: Region | None) -> None:  # noqa: B027 (the shard may stay on the device)
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
    def set_data(self, parameter: nn.Parameter, view: torch.Tensor) -> None:
        """Sets a parameter's data to the current data of `view`, its view of `flat`."""

    @abstractmethod
    def is_view(self, parameter: nn.Parameter, view: torch.Tensor) -> bool:
        """Whether a parameter still has the data set by `set_data`."""

    @abstractmethod
    def are_views(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> bool:
        """Whether this is true for all parameters, which must have elements. May return False if the fast check fails."""


def lies_at(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    # A tensor without elements has a meaningless address.
    is_there = parameter.data_ptr() == view.data_ptr() or parameter.numel() == 0
    return is_there and parameter.dtype == view.dtype


def addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], set[torch.dtype]]:
    # Use loops in C, because each step calls this for every parameter.
    return list(map(torch.Tensor.data_ptr, tensors)), set(map(_DTYPE, tensors))


class UnshardedMemory(ParameterMemory):
    """Parameters without sharding (stages 0 to 2)."""

    is_readable = True

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device, shard: Interval):
        self.shown = self.flat = allocate(layout.numel, dtype, device)
        self._own = self.flat[shard.start : shard.stop]
        # Caches the addresses of the last `views`; valid because `flat` never moves.
        self._asked: Sequence[torch.Tensor] = ()
        self._addresses = addresses_of(())

    @property
    def own(self) -> torch.Tensor:
        return self._own

    @property
    def lasting_bytes(self) -> int:
        return self.flat.nbytes

    def clear_padding(self, layout: BucketLayout) -> None:
        clear_padding(self.flat, layout)

    def store(self, view: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        ask_for(parameter)
        view.copy_(parameter)

    def set_data(self, parameter: nn.Parameter, view: torch.Tensor) -> None:
        # Use an alias instead of a view: `torch.save` of a view would write the whole bucket, and safetensors would treat all
        # views of a bucket as tied weights.
        parameter.data = alias(view)

    def is_view(self, parameter: nn.Parameter, view: torch.Tensor) -> bool:
        return lies_at(parameter, view)

    def are_views(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> bool:
        if views is not self._asked:
            self._asked, self._addresses = views, addresses_of(views)
        return addresses_of(parameters) == self._addresses
