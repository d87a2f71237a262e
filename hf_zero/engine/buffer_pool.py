"""The few buffers in which stages 2 and 3 collect whole gradients, one bucket after another."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..layout.pool import BufferKind, kind_of_buffer, shared_numel
from ..offload.tier import DeviceTier
from .buckets import Bucket


class OpenBuffer(NamedTuple):
    """A bucket's flat gradient buffer (numel,) of the reduce dtype, and the views of its slots."""

    flat: torch.Tensor
    views: list[torch.Tensor]

    @classmethod
    def of(cls, bucket: Bucket, flat: torch.Tensor) -> "OpenBuffer":
        return cls(flat, bucket.views_of(flat))


class BufferPool:
    """Whole-bucket buffers, kept by kind (layout/pool.py); at most `limit` shared ones.

    When gradients come in another order than the buckets, more than `limit` may be open at a time; the pool then grows rather
    than stand still.

    Attributes:
        most_bytes: the most that all its buffers have had at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], limit: int, device: torch.device):
        self._tier = DeviceTier(device)
        self._shared_numel = shared_numel([bucket.layout for bucket in buckets])
        self._limit = limit
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._shared_out = 0
        self._bytes = 0
        self.most_bytes = 0

    def exhausted_for(self, bucket: Bucket) -> bool:
        """True when a buffer for `bucket` would be one shared buffer more than the limit."""
        return self._kind(bucket) is BufferKind.SHARED and self._shared_out >= self._limit

    def take(self, bucket: Bucket) -> torch.Tensor:
        """A buffer of at least the bucket's elements, of the reduce dtype and undefined contents."""
        shared = self._kind(bucket) is BufferKind.SHARED
        self._shared_out += shared
        size = self._shared_numel if shared else bucket.layout.numel
        free = self._free.setdefault((size, bucket.precision.reduce), [])
        if free:
            return free.pop()
        buffer = self._tier.scratch(size, bucket.precision.reduce)
        self._bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        return buffer

    def give_back(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        kind = self._kind(bucket)
        self._shared_out -= kind is BufferKind.SHARED
        if kind is BufferKind.OVERSIZE:
            self._bytes -= buffer.nbytes
        else:
            self._free[(buffer.numel(), buffer.dtype)].append(buffer)

    def rest(self) -> None:
        """Drops the buffers not in use, until the next backward."""
        self._bytes -= sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
        self._free.clear()

    def _kind(self, bucket: Bucket) -> BufferKind:
        return kind_of_buffer(bucket.layout, self._shared_numel)
