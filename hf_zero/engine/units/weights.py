"""This rank's part of the model's weights, for sharded checkpoints: each element is on exactly one rank."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ...buckets.bucket import Bucket
from ...layout.intervals import Interval
from ...optimizer.state.holder import StateHolder


@dataclass(frozen=True, kw_only=True)
class OwnWeights:
    """A run of one parameter's elements, `interval`, row-major, and their values: 1-D, live where they are not cast."""

    parameter: nn.Parameter
    interval: Interval
    values: torch.Tensor


def held_weights(buckets: Iterable[Bucket], holder: StateHolder) -> Iterator[OwnWeights]:
    """This rank's part of every parameter that lies in a bucket, in the dtype that it is kept in.

    Where parameters have been through blocks, it is their master's. Ranks of a replicate group have copies of one part.
    """
    for bucket in buckets:
        if bucket.precision.weights is not None:
            for row in bucket.rows:
                master = holder.master_view(row).detach().reshape(-1)
                yield OwnWeights(
                    parameter=row.slot.parameter,
                    interval=row.layout.in_parameter,
                    values=master.to(bucket.precision.kept),
                )
            continue
        for slot in bucket.slots:
            common = slot.interval.intersect(bucket.own_interval)
            if common is not None:
                in_own = common.shift(-bucket.own_interval.start)
                yield OwnWeights(
                    parameter=slot.parameter,
                    interval=common.shift(-slot.interval.start),
                    values=bucket.memory.own_part(in_own),
                )


def load_weights(
    buckets: Iterable[Bucket], holder: StateHolder, read: Callable[[nn.Parameter, Interval], torch.Tensor]
) -> None:
    """Replaces this rank's part of every parameter in a bucket, and its master.

    Args:
        read: (parameter, run of its elements) → their values, a 1-D host tensor.
    """
    for bucket in buckets:
        with holder.at_hand(bucket) if bucket.trained else nullcontext(), torch.no_grad():
            for slot in bucket.slots:
                common = slot.interval.intersect(bucket.own_interval)
                if common is not None:
                    in_own = common.shift(-bucket.own_interval.start)
                    values = read(slot.parameter, common.shift(-slot.interval.start))
                    bucket.memory.write_own_part(in_own, values)
                    if bucket.precision.has_master:
                        bucket.master[in_own.start : in_own.stop].copy_(values)
