"""Sizes of the buffers that whole-bucket gradients pass through at stages 2 and 3."""

from collections.abc import Sequence
from enum import Enum

from .slots import BucketLayout

_SMALL_PART = 4


class BufferKind(Enum):
    """How a bucket's gradient buffer is kept.

    SHARED: one of a few buffers of the largest ordinary bucket's size, made once and passed on.
    SMALL: its own, made once. A handful of biases would hold a shared one through the whole backward.
    OVERSIZE: its own, and dropped when reduced: a parameter larger than a bucket should be (an embedding), which would
        otherwise set the size of all shared ones.

    Shared and oversize buffers are large: there are only so many of them at a time, free ones counted. Small ones are not
    counted, and each is less than a quarter of a shared one.
    """

    SHARED = "shared"
    SMALL = "small"
    OVERSIZE = "oversize"


def shared_numel(buckets: Sequence[BucketLayout]) -> int:
    """Elements of a shared buffer: the largest bucket's that is not oversize; 0 where there is none."""
    return max((bucket.numel for bucket in buckets if not bucket.oversize), default=0)


def kind_of_buffer(bucket: BucketLayout, shared: int) -> BufferKind:
    """The kind for `bucket` where shared buffers have `shared` elements."""
    if bucket.oversize:
        return BufferKind.OVERSIZE
    return BufferKind.SMALL if bucket.numel * _SMALL_PART < shared else BufferKind.SHARED


def pool_numel(buckets: Sequence[BucketLayout], limit: int) -> int:
    """The most elements that all buffers have at a time, where gradients come in the order of the buckets.

    Large buffers in use at the same time are then those of `limit` buckets that follow one another: embeddings at both ends of
    a model do not meet. Buckets of different keys fill side by side, and nobody knows in which order: where large ones have
    several keys, the largest count, `limit` of them or one for each key.

    Args:
        buckets: in the order in which they are reduced.
        limit: large buffers at a time.
    """
    shared = shared_numel(buckets)
    kinds = [(kind_of_buffer(bucket, shared), bucket) for bucket in buckets]
    small = sum(bucket.numel for kind, bucket in kinds if kind is BufferKind.SMALL)
    large = [(kind, bucket) for kind, bucket in kinds if kind is not BufferKind.SMALL]
    sizes = [shared if kind is BufferKind.SHARED else bucket.numel for kind, bucket in large]
    keys = len({bucket.key for _, bucket in large})
    if keys > 1:
        return sum(sorted(sizes, reverse=True)[: max(limit, keys)]) + small
    neighbours = (sizes[first : first + limit] for first in range(len(sizes)))
    return max(map(sum, neighbours), default=0) + small
