"""A pool of bucket-sized gradient buffers, which stages 2 and 3 fill and reduce one after the other."""

from collections.abc import Sequence

import torch

from ..buckets.bucket import Bucket
from ..layout.gradient_buffers import BufferKind, kind_of_buffer, shared_numel
from ..offload.tiers import Tier


class BufferPool:
    """Whole-bucket buffers by kind (`BufferKind`); at most `limit` large ones, in use or free.

    If gradients do not arrive in the order of the buckets, more than `limit` buffers may be needed at a time. Then the pool
    grows, because waiting would be a deadlock.

    Attributes:
        most_bytes: the largest number of bytes that all buffers have had at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], limit: int, device: torch.device):
        self._tier = Tier(device)
        shared = shared_numel([bucket.layout for bucket in buckets])
        self._limit = limit
        # Unused buffers by kind and dtype. Small buffers do not count against the limit.
        self._free: dict[tuple[BufferKind, torch.dtype], list[torch.Tensor]] = {}
        # The list of each bucket's unused buffers.
        self._free_for: dict[Bucket, list[torch.Tensor]] = {}
        self._small: set[Bucket] = set()
        self._oversize: set[Bucket] = set()
        for bucket in buckets:
            kind = kind_of_buffer(bucket.layout, shared)
            self._free_for[bucket] = self._free.setdefault((kind, bucket.precision.reduce), [])
            if kind is BufferKind.SMALL:
                self._small.add(bucket)
            elif kind is BufferKind.OVERSIZE:
                self._oversize.add(bucket)
        self._large_out = 0
        self._bytes = 0
        self.most_bytes = 0

    def room_for(self, bucket: Bucket, in_use: int = 0) -> int | None:
        """Returns how many large buffers may still be borrowed; None if the bucket's buffer is small, which has no limit.

        Args:
            in_use: lowers the limit by this number of large buffers, whose memory is in use elsewhere.
        """
        return None if bucket in self._small else max(0, max(1, self._limit - in_use) - self._large_out)

    def take(self, bucket: Bucket, in_use: int = 0) -> torch.Tensor:
        """Returns a buffer of the reduce dtype with at least the bucket's elements and undefined contents. `in_use`: as above."""
        free, numel, is_large = self._free_for[bucket], bucket.layout.numel, bucket not in self._small
        self._large_out += is_large
        if len(free) == 1 and free[0].numel() >= numel:
            return free.pop()
        large_enough = [index for index, buffer in enumerate(free) if buffer.numel() >= numel] if free else None
        # The smallest of these, because a larger bucket may need a larger one at the same time.
        if large_enough:
            return free.pop(min(large_enough, key=lambda index: free[index].numel()))
        if is_large:
            self._make_room(max(1, self._limit - in_use))
        buffer = self._tier.scratch(numel, bucket.precision.reduce)
        self._bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        return buffer

    def release(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        self._large_out -= bucket not in self._small
        # Freed at once. Otherwise, an embedding's buffer would stay in memory until the end of the backward.
        if bucket in self._oversize:
            self._bytes -= buffer.nbytes
        else:
            self._free_for[bucket].append(buffer)

    def free_unused(self) -> None:
        """Frees the buffers not in use."""
        for buffers in self._free.values():
            self._bytes -= sum(buffer.nbytes for buffer in buffers)
            buffers.clear()

    def _make_room(self, most: int) -> None:
        """Frees unused large buffers until used and unused ones are at most `most`."""
        free = [buffers for (kind, _), buffers in self._free.items() if kind is BufferKind.SHARED]
        while self._large_out + sum(map(len, free)) > most and any(free):
            self._bytes -= max(free, key=len).pop().nbytes
