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
        self._kind = {bucket: kind_of_buffer(bucket.layout, shared) for bucket in buckets}
        self._limit = limit
        # By kind and dtype. Small buffers do not count against the limit.
        self._free: dict[tuple[BufferKind, torch.dtype], list[torch.Tensor]] = {}
        self._large_out = 0
        self._bytes = 0
        self.most_bytes = 0

    def room_for(self, bucket: Bucket, beside: int = 0) -> int | None:
        """Returns how many large buffers may still be borrowed; None if the bucket's buffer is small, which has no limit.

        Args:
            beside: lowers the limit by this number of large buffers, whose memory is in use elsewhere.
        """
        return None if self._kind[bucket] is BufferKind.SMALL else max(0, self._most(beside) - self._large_out)

    def _most(self, beside: int) -> int:
        return max(1, self._limit - beside)

    def take(self, bucket: Bucket, beside: int = 0) -> torch.Tensor:
        """Returns a buffer of the reduce dtype with at least the bucket's elements and undefined contents. `beside`: as above."""
        kind, dtype = self._kind[bucket], bucket.precision.reduce
        self._large_out += kind is not BufferKind.SMALL
        free = self._free.get((kind, dtype), [])
        if len(free) == 1 and free[0].numel() >= bucket.layout.numel:
            return free.pop()
        large_enough = [place for place, buffer in enumerate(free) if buffer.numel() >= bucket.layout.numel]
        # The smallest of these, because a larger bucket may need a larger one at the same time.
        if large_enough:
            return free.pop(min(large_enough, key=lambda place: free[place].numel()))
        if kind is not BufferKind.SMALL:
            self._make_room(self._most(beside))
        buffer = self._tier.scratch(bucket.layout.numel, dtype)
        self._bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        return buffer

    def release(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        kind = self._kind[bucket]
        self._large_out -= kind is not BufferKind.SMALL
        # Freed at once. Otherwise, an embedding's buffer would stay in memory until the end of the backward.
        if kind is BufferKind.OVERSIZE:
            self._bytes -= buffer.nbytes
        else:
            self._free.setdefault((kind, buffer.dtype), []).append(buffer)

    def rest(self) -> None:
        """Frees the buffers not in use."""
        self._bytes -= sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
        self._free.clear()

    def _make_room(self, most: int) -> None:
        """Frees unused large buffers until used and unused ones are at most `most`."""
        free = [buffers for (kind, _), buffers in self._free.items() if kind is BufferKind.SHARED]
        while self._large_out + sum(map(len, free)) > most and any(free):
            self._bytes -= max(free, key=len).pop().nbytes
