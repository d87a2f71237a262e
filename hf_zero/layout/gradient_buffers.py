"""Sizes of the buffers that hold whole gradients of a bucket at stages 2 and 3."""

from collections.abc import Sequence
from enum import Enum

from .buckets import BucketLayout

GRAD_BUFFERS = 3
"""Large buffers at a time: backward waits for the oldest bucket where another is full."""

_SMALL_PART = 4


class BufferKind(Enum):
    """The lifetime of a bucket's gradient buffer.

    SHARED: one of a few buffers, passed on to buckets that are no larger than the one that it was made for.
    SMALL: one beside those, passed on among small ones. A handful of biases would hold a shared one through the whole backward.
    OVERSIZE: its own, and dropped when reduced: a parameter larger than a bucket should be (an embedding), which would
        otherwise be kept for smaller ones.

    Shared and oversize buffers are large: there are only so many of them at a time, free ones counted. Small ones are not
    counted, and each is less than a quarter of the largest shared one.
    """

    SHARED = "shared"
    SMALL = "small"
    OVERSIZE = "oversize"


def shared_numel(buckets: Sequence[BucketLayout]) -> int:
    """Counts elements of the largest shared buffer, that of the largest bucket that is not oversize; 0 without one."""
    return max((bucket.numel for bucket in buckets if not bucket.oversize), default=0)


def kind_of_buffer(bucket: BucketLayout, shared: int) -> BufferKind:
    """Chooses the kind for `bucket` where the largest shared buffer has `shared` elements."""
    if bucket.oversize:
        return BufferKind.OVERSIZE
    return BufferKind.SMALL if bucket.numel * _SMALL_PART < shared else BufferKind.SHARED


def pool_numel(buckets: Sequence[BucketLayout], limit: int) -> int:
    """Counts the most elements of all buffers at a time, where gradients come in the order of the buckets.

    Large buffers in use at the same time are then those of `limit` buckets that follow one another: embeddings at both ends of
    a model do not meet. What they leave of `limit` may be the largest shared buffers so far, in use or free. Buckets of different
    keys fill side by side, and nobody knows in which order: where large ones have several keys, the largest count, `limit` of
    them or one for each key.

    Args:
        buckets: in the order in which they are reduced.
        limit: large buffers at a time.
    """
    shared = shared_numel(buckets)
    small = sum(bucket.numel for bucket in buckets if kind_of_buffer(bucket, shared) is BufferKind.SMALL)
    large = [bucket for bucket in buckets if kind_of_buffer(bucket, shared) is not BufferKind.SMALL]
    return small + max((_large_numel(large[:stop], limit) for stop in range(1, len(large) + 1)), default=0)


def pool_growth(buckets: Sequence[BucketLayout], limit: int) -> list[int]:
    """Counts the most elements of all buffers when each bucket has just taken its own; see `pool_numel`.

    Args:
        buckets: in the order in which their first gradients come.
        limit: large buffers at a time.
    """
    shared = shared_numel(buckets)
    small, large, found = 0, [], []
    for bucket in buckets:
        if kind_of_buffer(bucket, shared) is BufferKind.SMALL:
            small += bucket.numel
        else:
            large.append(bucket)
        found.append(small + _large_numel(large, limit))
    return found


def _large_numel(taken: Sequence[BucketLayout], limit: int) -> int:
    """Counts elements of large buffers, at most, when the last of these buckets has just taken its own."""
    keys = len({bucket.key for bucket in taken})
    if keys > 1:
        return sum(sorted((bucket.numel for bucket in taken), reverse=True)[: max(limit, keys)])
    # At most `limit` of them, so that the difference below is never negative: a negative stop would count nearly all buffers.
    oversize = [bucket.numel for bucket in taken[-limit:] if bucket.oversize]
    passed_on = sorted((bucket.numel for bucket in taken if not bucket.oversize), reverse=True)
    return sum(oversize) + sum(passed_on[: limit - len(oversize)])
