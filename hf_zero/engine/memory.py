"""Where a bucket's parameters lie: whole, or as a shard to which the rest is gathered for a while."""

from abc import ABC, abstractmethod

import torch

from ..device import Reservation, alias, allocate, reserve, reserve_apart
from ..layout.intervals import Interval
from ..layout.slots import BucketLayout


class ParameterMemory(ABC):
    """The flat buffer of one bucket's parameters.

    Attributes:
        flat: (numel,) of the param dtype.
        own: this rank's shard, (shard_numel,); a part of `flat` unless it has memory of its own.
    """

    flat: torch.Tensor
    own: torch.Tensor

    @property
    @abstractmethod
    def lasting_bytes(self) -> int:
        """Bytes held all the time."""

    @property
    @abstractmethod
    def is_readable(self) -> bool:
        """Whether parameters are whole now."""

    @abstractmethod
    def clear_padding(self, layout: BucketLayout) -> None:
        """Zeroes what belongs to no parameter, as far as it lasts."""

    @abstractmethod
    def take_in(self, place: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        """Copies a parameter's values to its `place` in `flat`, which are the elements `interval`."""

    @abstractmethod
    def settle(self) -> None:
        """Called when all parameters are in: gives back what does not last."""

    @abstractmethod
    def view(self, place: torch.Tensor) -> torch.Tensor:
        """What a parameter at `place` has as its data now."""

    @abstractmethod
    def is_view(self, parameter: torch.Tensor, place: torch.Tensor) -> bool:
        """Whether a parameter's data is what `view` gave it."""


class WholeMemory(ParameterMemory):
    """All parameters, all the time (stages 0 to 2)."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device, shard: Interval):
        self.flat = allocate(layout.numel, dtype, device)
        self.own = self.flat[shard.start : shard.stop]

    @property
    def lasting_bytes(self) -> int:
        return self.flat.nbytes

    @property
    def is_readable(self) -> bool:
        return True

    def clear_padding(self, layout: BucketLayout) -> None:
        for gap in layout.padding:
            self.flat[gap.start : gap.stop].zero_()

    def take_in(self, place: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        place.copy_(parameter)

    def settle(self) -> None:
        """All of it lasts."""

    def view(self, place: torch.Tensor) -> torch.Tensor:
        return alias(place)

    def is_view(self, parameter: torch.Tensor, place: torch.Tensor) -> bool:
        return parameter.data_ptr() == place.data_ptr() and parameter.dtype == place.dtype


class ShardMemory(ParameterMemory):
    """This rank's shard all the time, the rest only from `gather` to `drop` (stage 3).

    A parameter that is not gathered keeps its shape and reads as NaN: every element is one NaN of stride 0. A read that
    should have been preceded by a gather then shows in the loss, and cannot crash the process as freed memory would.
    """

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device, shard: Interval):
        self._shard = shard
        self._reservation = self._reserve(layout.numel, dtype, device, slice(shard.start, shard.stop))
        self.flat, self.own = self._reservation.flat, self._reservation.own
        self._absent = torch.full((), float("nan"), dtype=dtype, device=device)
        self._gathered = False

    def _reserve(self, numel: int, dtype: torch.dtype, device: torch.device, kept: slice) -> Reservation:
        return reserve(numel, dtype, device, kept)

    @property
    def lasting_bytes(self) -> int:
        return self.own.nbytes

    @property
    def passing_bytes(self) -> int:
        """Bytes that `gather` takes and `drop` gives back."""
        return self.flat.nbytes - (self.own.nbytes if self._reservation.in_place else 0)

    @property
    def is_readable(self) -> bool:
        return self._gathered

    def gather(self) -> None:
        """Gives `flat` memory, to be filled by an all-gather."""
        self._reservation.restore()
        self._gathered = True

    def drop(self) -> None:
        """Gives back everything but the shard."""
        self._gathered = False
        self._reservation.release()
        # `p.data.zero_()` on an absent parameter would have made it read as 0.
        self._absent.fill_(float("nan"))

    def was_written(self) -> bool:
        """Whether something was written into absent parameters. Told on the host only: elsewhere it would stop the queue."""
        return self._absent.device.type == "cpu" and not self._gathered and not self._absent.isnan().item()

    def snapshot(self) -> torch.Tensor | None:
        """A copy of the shard where edits of `flat` change it at once; None where `drop` forgets them."""
        return self.own.clone() if self._reservation.in_place else None

    def keep_edits(self) -> None:
        """Takes this rank's part of an edited `flat` into the shard."""
        if not self._reservation.in_place:
            self.own.copy_(self.flat[self._shard.start : self._shard.stop])

    def clear_padding(self, layout: BucketLayout) -> None:
        for gap in layout.padding:
            common = gap.intersect(self._shard)
            if common is not None:
                common = common.shift(-self._shard.start)
                self.own[common.start : common.stop].zero_()

    def take_in(self, place: torch.Tensor, interval: Interval, parameter: torch.Tensor) -> None:
        common = interval.intersect(self._shard)
        if common is not None:
            source, target = common.shift(-interval.start), common.shift(-self._shard.start)
            values = parameter.reshape(-1)[source.start : source.stop]
            self.own[target.start : target.stop].copy_(values)

    def settle(self) -> None:
        self._reservation.release()

    def view(self, place: torch.Tensor) -> torch.Tensor:
        return place if self._gathered else self._absent.expand(place.shape)

    def is_view(self, parameter: torch.Tensor, place: torch.Tensor) -> bool:
        expected = place if self._gathered else self._absent
        return parameter.data_ptr() == expected.data_ptr() and parameter.dtype == place.dtype


class ApartShardMemory(ShardMemory):
    """A shard beside the buffer that parameters are gathered in: it stays exact where what is gathered is quantised."""

    def _reserve(self, numel: int, dtype: torch.dtype, device: torch.device, kept: slice) -> Reservation:
        return reserve_apart(numel, dtype, device, kept)
