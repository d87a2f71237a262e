"""Sizes of the buffers for whole gradients of a bucket at stages 2 and 3."""

from collections.abc import Sequence
from enum import Enum

from .buckets import BucketLayout

GRAD_BUFFERS = 3
"""Number of large buffers. If all are full, backward waits for the oldest bucket."""

_SMALL_PART = 4


class BufferKind(Enum):
    """How long a bucket's gradient buffer lives.

    SHARED: one of a few buffers, reused by buckets that are no larger than the buffer.
    SMALL: an additional buffer, reused among small buckets. Otherwise a few biases would occupy a shared buffer during the whole
        backward.
    OVERSIZE: a buffer for one bucket, freed after the reduction. Its parameter is larger than the bucket size (an embedding), and
        a reused buffer of that size would waste memory.

    Shared and oversize buffers are large. Their number is limited, free ones included. The number of small buffers is not
    limited; each is smaller than a quarter of the largest shared buffer.
    """

    SHARED = "shared"
    SMALL = "small"
    OVERSIZE = "oversize"


def shared_numel(buckets: Sequence[BucketLayout]) -> int:
    """Elements of the largest shared buffer, for the largest bucket below the oversize limit; 0 without one."""
    return max((bucket.numel for bucket in buckets if not bucket.oversize), default=0)


def kind_of_buffer(bucket: BucketLayout, shared: int) -> BufferKind:
    """Chooses the kind of buffer for `bucket`; `shared` is the number of elements of the largest shared buffer."""
    if bucket.oversize:
        return BufferKind.OVERSIZE
    return BufferKind.SMALL if bucket.numel * _SMALL_PART < shared else BufferKind.SHARED


def pool_numel(buckets: Sequence[BucketLayout], limit: int) -> int:
    """Maximum number of elements of all buffers at one time, if gradients arrive in the order of the buckets.

    Large buffers that are in use at the same time then belong to `limit` consecutive buckets, so embeddings at both ends of a
    model are not counted together. The other large buffers are the largest shared buffers so far, in use or free. Buckets with
    different keys fill at the same time and in an unknown order. So if the large buckets have several keys, the largest ones
    count: `limit` buckets, or one for each key.

    Args:
        buckets: in the order in which they are reduced.
        limit: maximum number of large buffers at one time.
    """
    shared = shared_numel(buckets)
    small = sum(bucket.numel for bucket in buckets if kind_of_buffer(bucket, shared) is BufferKind.SMALL)
    large = [bucket for bucket in buckets if kind_of_buffer(bucket, shared) is not BufferKind.SMALL]
    return small + max((_large_numel(large[:stop], limit) for stop in range(1, len(large) + 1)), default=0)


def pool_growth(buckets: Sequence[BucketLayout], limit: int) -> list[int]:
    """Maximum number of elements of all buffers at the moment when each bucket gets its buffer; see `pool_numel`.

    Args:
        buckets: in the order in which their first gradients arrive.
        limit: maximum number of large buffers at one time.
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
    """Maximum number of elements of large buffers when the last of these buckets has just got its buffer."""
    keys = len({bucket.key for bucket in taken})
    if keys > 1:
        return sum(sorted((bucket.numel for bucket in taken), reverse=True)[: max(limit, keys)])
    # At most `limit` buckets, because a negative stop in the slice below would count nearly all buffers.
    oversize = [bucket.numel for bucket in taken[-limit:] if bucket.oversize]
    passed_on = sorted((bucket.numel for bucket in taken if not bucket.oversize), reverse=True)
    return sum(oversize) + sum(passed_on[: limit - len(oversize)])
