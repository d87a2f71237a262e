"""Sizes of the buffers that whole-bucket gradients pass through at stage 2."""

from collections.abc import Sequence

_SMALL_PART = 4


def is_large(bucket_numel: int, largest_numel: int) -> bool:
    """Whether a bucket shares the large buffers. One of less than a quarter of the largest has a buffer of its own size, so
    that a handful of biases does not hold a large one through the whole backward."""
    return bucket_numel * _SMALL_PART >= largest_numel


def pool_numel(bucket_numels: Sequence[int], limit: int) -> int:
    """Elements of all buffers: at most `limit` of the largest bucket's size, and one for each small bucket."""
    largest = max(bucket_numels)
    large = sum(is_large(numel, largest) for numel in bucket_numels)
    return min(limit, large) * largest + sum(numel for numel in bucket_numels if not is_large(numel, largest))
