"""Chooses how gradients are kept and reduced, by stage."""

from collections.abc import Sequence

from ...buckets.bucket import Bucket
from ...config import ZeroConfig
from ...layout import pool
from ..travel.reductions import Reduction
from .accumulated_store import AccumulatedGradients
from .buffer_pool import BufferPool
from .replicated_store import ReplicatedGradients
from .sharded_store import PooledGradients, UnshardedGradients
from .store import GradientStore, Landing


def choose_store(
    buckets: Sequence[Bucket],
    config: ZeroConfig,
    reduction: Reduction,
    landing: Landing,
) -> GradientStore:
    """The store of a stage."""
    replicated = all(bucket.group.groups.shard_size == 1 for bucket in buckets)
    if all(bucket.rows_are_parameters for bucket in buckets):
        return ReplicatedGradients(reduction, landing)
    if replicated and not any(bucket.tier.is_apart for bucket in buckets):
        # The shard is all of the bucket: there is no smaller place to reduce it into.
        return UnshardedGradients(reduction, landing)
    passing = PooledGradients(reduction, landing, BufferPool(buckets, pool.GRAD_BUFFERS, buckets[0].device))
    return AccumulatedGradients(UnshardedGradients(reduction, landing), passing) if config.stage == 1 else passing
