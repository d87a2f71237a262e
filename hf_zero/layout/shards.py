"""Which interval of which parameter a rank owns: the rows that the optimizer, the tiers and the checkpoints speak in."""

from dataclasses import dataclass

from .intervals import Interval
from .slots import BucketLayout


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The part of one parameter that lies in one rank's shard.

    `in_parameter` counts elements of the parameter, row-major; `in_shard` the same elements of the rank's shard.
    """

    name: str
    in_parameter: Interval
    in_shard: Interval


def rows_of_shard(bucket: BucketLayout, rank: int) -> tuple[RowLayout, ...]:
    """The rows of `rank`'s shard of `bucket`, in slot order. Together over ranks they cover every parameter once."""
    shard = bucket.shard(rank)
    rows = []
    for slot in bucket.slots:
        common = slot.interval.intersect(shard)
        if common is not None:
            in_parameter, in_shard = common.shift(-slot.interval.start), common.shift(-shard.start)
            rows.append(RowLayout(name=slot.name, in_parameter=in_parameter, in_shard=in_shard))
    return tuple(rows)
