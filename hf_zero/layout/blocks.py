"""8-bit blocks of optimizer moments in a bucket, and their bytes.

[Note: blocks of parameters] A block is 256 neighbours of one parameter, counted from its first element. Slots then start,
and shards end, at multiples of 256, so that a parameter's blocks are the same on every world size, stage and bucket size,
and no shard cuts one: another run loads the blocks of a checkpoint without requantising them.
"""

from .buckets import SHARD_ALIGN_NUMEL, SLOT_ALIGN_NUMEL, Alignment, BucketLayout

BLOCK_NUMEL = 256
"""Elements that share a scale."""

SMALLEST_NUMEL = 4096
"""Parameters of fewer elements keep their moments as they are, as in Dettmers et al. 2021: biases and norms take little."""

IN_BLOCKS = Alignment(
    slot_numel=max(SLOT_ALIGN_NUMEL, BLOCK_NUMEL),
    shard_numel=max(SHARD_ALIGN_NUMEL, BLOCK_NUMEL),
)
"""Of buckets whose moments are in blocks."""

_SCALE_BYTES = 4


def is_in_blocks(numel: int) -> bool:
    """Whether the moments of a parameter of `numel` elements are in blocks."""
    return numel >= SMALLEST_NUMEL


def blocks(numel: int) -> int:
    """Counts the blocks, and so scales, of `numel` elements."""
    return -(-numel // BLOCK_NUMEL)


def block_bytes(numel: int) -> int:
    """Counts bytes of `numel` elements in blocks: one each, and the scales."""
    return numel + _SCALE_BYTES * blocks(numel)


def has_blocks(bucket: BucketLayout) -> bool:
    """Whether a bucket has a parameter whose moments are in blocks."""
    return any(is_in_blocks(slot.interval.numel) for slot in bucket.slots)


def moment_bytes(bucket: BucketLayout, itemsize: int) -> int:
    """Counts bytes of one moment in a rank's shard of a bucket. Small parameters take `itemsize` an element.

    Which rank has the small ones is left open: they count as if they were spread over the shards.
    """
    if not has_blocks(bucket):
        return bucket.shard_numel * itemsize
    # Small parameters count twice: the codes and scales of a bucket cover its whole shard, small parameters and padding too.
    small = sum(slot.interval.numel for slot in bucket.slots if not is_in_blocks(slot.interval.numel))
    return block_bytes(bucket.shard_numel) + -(-small // bucket.shards) * itemsize
