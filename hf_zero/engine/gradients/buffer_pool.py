"""A pool of bucket-sized gradient buffers, which stages 2 and 3 fill and reduce one after the other."""

from collections.abc import Sequence
from functools import cached_property

import torch

from ...buckets.bucket import Bucket
from ...layout.pool import BufferKind, kind_of_buffer, shared_numel
from ...offload.tier import Tier


class OpenBuffer:
    """A bucket's flat gradient buffer (numel,) of the reduce dtype."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor):
        self.flat = flat
        self._bucket = bucket

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """Of the bucket's slots, in their order; made when the first is needed."""
        return self._bucket.views_of(self.flat)


class BufferPool:
    """Whole-bucket buffers, kept by kind (layout/pool.py); at most `limit` large ones, in use or free.

    When gradients come in another order than the buckets, more than `limit` may be open at a time; the pool then grows rather
    than stand still.

    Attributes:
        most_bytes: the most that all its buffers have had at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], limit: int, device: torch.device):
        self._tier = Tier(device)
        self._shared_numel = shared_numel([bucket.layout for bucket in buckets])
        self._limit = limit
        # By kind and dtype: a small buffer that is free does not count against the limit.
        self._free: dict[tuple[BufferKind, torch.dtype], list[torch.Tensor]] = {}
        self._large_out = 0
        self._bytes = 0
        self.most_bytes = 0

    def exhausted_for(self, bucket: Bucket) -> bool:
        """True when a buffer for `bucket` would be one large buffer more than the limit."""
        return self._kind(bucket) is not BufferKind.SMALL and self._large_out >= self._limit

    def is_last_for(self, bucket: Bucket) -> bool:
        """True when the next buffer that is as large as this bucket's will be one more than the limit."""
        return self._kind(bucket) is not BufferKind.SMALL and self._large_out == self._limit - 1

    def take(self, bucket: Bucket) -> torch.Tensor:
        """A buffer of at least the bucket's elements, of the reduce dtype and undefined contents."""
        kind, dtype = self._kind(bucket), bucket.precision.reduce
        self._large_out += kind is not BufferKind.SMALL
        free = self._free.get((kind, dtype), [])
        large_enough = [place for place, buffer in enumerate(free) if buffer.numel() >= bucket.layout.numel]
        if large_enough:
            return free.pop(min(large_enough, key=lambda place: free[place].numel()))
        if kind is not BufferKind.SMALL:
            self._make_room()
        buffer = self._tier.scratch(bucket.layout.numel, dtype)
        self._bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        return buffer

    def give_back(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        kind = self._kind(bucket)
        self._large_out -= kind is not BufferKind.SMALL
        if kind is BufferKind.OVERSIZE:
            self._bytes -= buffer.nbytes
        else:
            self._free.setdefault((kind, buffer.dtype), []).append(buffer)

    def rest(self) -> None:
        """Drops the buffers not in use, until the next backward."""
        self._bytes -= sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
        self._free.clear()

    def _make_room(self) -> None:
        """Drops free large buffers that would be too many beside those in use."""
        free = [buffers for (kind, _), buffers in self._free.items() if kind is BufferKind.SHARED]
        while self._large_out + sum(map(len, free)) > self._limit and any(free):
            self._bytes -= max(free, key=len).pop().nbytes

    def _kind(self, bucket: Bucket) -> BufferKind:
        return kind_of_buffer(bucket.layout, self._shared_numel)
