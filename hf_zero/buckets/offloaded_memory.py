"""Memory of a bucket whose parameter shard is offloaded to host memory or a file."""

from collections.abc import Callable

import torch

from ..layout.buckets import BucketLayout
from ..layout.intervals import Interval
from ..offload.copies import HostToDevice
from ..offload.shards import ParameterShard, ParameterTier, Region
from ..queues import side_queue
from .gathered_memory import GatheredMemory, Started


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
        return self.own_view

    @property
    def writable_own(self) -> torch.Tensor | None:
        return None

    @property
    def is_master(self) -> bool:
        return self._values.is_master

    def gather(self, start: Callable[[], Started], *, exactly: bool) -> Started:
        values = self._values.fetched()
        self._make_room(exactly=exactly)
        # Use the side queue: forward and backward continue while the shard crosses the bus, and during the all-gather after the
        # copy.
        with self._queue.in_parallel():
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

    def move_to_tier(self, master: Region | None) -> None:
        self._values.move_to_tier(master)

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
