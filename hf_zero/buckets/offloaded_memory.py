"""Memory of a bucket whose shard of the parameters is offloaded to host memory or a file."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..device import reserve, side_queue
from ..layout.intervals import Interval
from ..layout.slots import BucketLayout
from ..offload.parameter_shards import ParameterShard, ParameterTier, Region
from ..offload.uplink import Uplink
from .memory import ApartShardMemory, CastShardMemory, GatheredMemory, ShardMemory


class OffloadedMemory(GatheredMemory):
    """The shard is offloaded, and is copied to the device for each all-gather.

    Args:
        values: the shard.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        shard: Interval,
        *,
        values: ParameterShard,
    ):
        super().__init__(reserve(layout.numel, dtype, device, slice(0, 0)), shard)
        self._values = values
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

    @property
    def lasting_bytes(self) -> int:
        return self.own.nbytes

    @property
    def passing_bytes(self) -> int:
        return self.flat.nbytes

    @contextmanager
    def gather(self, *, exactly: bool) -> Iterator[None]:
        values = self._values.fetched()
        self._make_room(exactly=exactly)
        with self._queue.aside():
            if values.dtype != self.source.dtype:
                # Cast where it arrives: a copy between devices that casts would do so on the host, which would wait for it.
                values = values.to(self.flat.device, non_blocking=True)
            self.source.copy_(values, non_blocking=True)
            yield
        self._copied = self._queue.mark()

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
        return self._values.fetched()

    def write_own(self, values: torch.Tensor, uplink: Uplink) -> None:
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
    if kept != dtype:
        return CastShardMemory(layout, dtype, device, shard, kept)
    return (ApartShardMemory if rounded else ShardMemory)(layout, dtype, device, shard)
