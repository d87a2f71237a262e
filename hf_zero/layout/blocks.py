"""8-bit blocks of optimizer moments in a bucket, and their bytes.

[Note: blocks of parameters] A block is 256 consecutive elements of one parameter, counted from its first element. Slots start
and shards end at multiples of 256. Therefore the blocks of a parameter are the same for every world size, stage and bucket size,
no shard cuts a block, and another run can load the blocks of a checkpoint without quantizing them again.
"""

from .buckets import SHARD_ALIGN_NUMEL, SLOT_ALIGN_NUMEL, Alignment, BucketLayout

BLOCK_NUMEL = 256
"""Elements that share a scale."""

SMALLEST_NUMEL = 4096
"""Moments of smaller parameters are not quantized, as in Dettmers et al. 2021: biases and norms need little memory."""

IN_BLOCKS = Alignment(
    slot_numel=max(SLOT_ALIGN_NUMEL, BLOCK_NUMEL),
    shard_numel=max(SHARD_ALIGN_NUMEL, BLOCK_NUMEL),
)
"""Alignment of buckets whose moments are in blocks."""

_SCALE_BYTES = 4


def is_in_blocks(numel: int) -> bool:
    """Whether the moments of a parameter of `numel` elements are in blocks."""
    return numel >= SMALLEST_NUMEL


def blocks(numel: int) -> int:
    """Number of blocks, and so of scales, of `numel` elements."""
    return -(-numel // BLOCK_NUMEL)


def block_bytes(numel: int) -> int:
    """Bytes of `numel` elements in blocks: one byte for each element, and the scales."""
    return numel + _SCALE_BYTES * blocks(numel)


def has_blocks(bucket: BucketLayout) -> bool:
    """Whether a bucket has a parameter whose moments are in blocks."""
    return any(is_in_blocks(slot.interval.numel) for slot in bucket.slots)


def moment_bytes(bucket: BucketLayout, itemsize: int) -> int:
    """Bytes of one moment in a rank's shard of a bucket, with `itemsize` bytes for each element of a small parameter.

    Which rank owns a small parameter is not considered: small parameters count as if they were spread evenly over the shards.
    """
    if not has_blocks(bucket):
        return bucket.shard_numel * itemsize
    # The codes and scales of a bucket cover its whole shard, padding and small parameters included. So small parameters count
    # twice.
    small = sum(slot.interval.numel for slot in bucket.slots if not is_in_blocks(slot.interval.numel))
    return block_bytes(bucket.shard_numel) + -(-small // bucket.shards) * itemsize
