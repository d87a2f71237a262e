"""Sums of gradients sent in blocks, inside a shard group and between shard groups."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import RESIDUAL, KindsOf, Read, StateRow
from ..comm.groups import Groups
from ..comm.steps_in_order import StepsInOrder
from ..comm.transport import DataParallelGroup, Handle
from ..comm.waits import Label
from ..config import CommConfig
from ..layout.intervals import Interval
from ..step.reductions import Reduction
from .block_collectives import all_gather_blocks, reduce_scatter_blocks
from .quantize import BlockFormat
from .residuals import BETWEEN, OF_GROUPS, OF_RANKS, OF_SUMS, Residuals

_SAMPLED_PASSES = 100
"""Every so many backward passes, one bucket is also reduced exactly, to measure the error."""


class Route:
    """Sends quantized gradients from all ranks to the owners of their sums. This class uses one reduce-scatter and quantizes
    once.

    Args:
        residuals: residuals with the layout of buckets.

    Attributes:
        residuals: the residuals of each quantization.
    """

    def __init__(self, format: BlockFormat, residuals: Residuals):
        self._format = format
        self._unsent = residuals
        self.residuals = [residuals]

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """See `Reduction.start`."""
        label, group, unsent = bucket.labels["reduce-scatter of gradients"], bucket.group, self._unsent.of(bucket)
        return reduce_scatter_blocks(group.transport, self._format, flat, out, unsent, group.groups.shard, label)


class BetweenGroups(Route):
    """A reduce-scatter inside the shard group, a reduce-scatter of each shard over its replicate group, and an all-gather there.

    All three are quantized; the first two are qgZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209). For a bucket of n elements in R
    groups of S ranks, a rank sends codes and scales of 2(R-1)/R x n/S elements to other groups. The ranks of a replicate group
    dequantize the gathered values from the same codes, so their results are equal to the last bit.

    Args:
        within: the first of the three collectives.
        between, of_sums: residuals of the other two, with the layout of a rank's shards and of its parts of shards.
        order: starts all steps between ranks of a replicate group in the same order.
    """

    def __init__(
        self,
        format: BlockFormat,
        *,
        within: Route,
        between: Residuals,
        of_sums: Residuals,
        order: StepsInOrder,
    ):
        self._format = format
        self._within = within
        self._between = between
        self._of_sums = of_sums
        self._order = order
        self.residuals = [*within.residuals, between, of_sums]

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        transport, format, group = bucket.group.transport, self._format, bucket.group.groups.replicate
        part = out.view(group.size, -1)[group.index]
        scattered, gathered = (
            bucket.labels[f"{verb} of shards of gradients"] for verb in ("reduce-scatter", "all-gather")
        )
        steps = self._order.begin(
            lambda: self._within.start(bucket, flat, out),
            lambda: reduce_scatter_blocks(transport, format, out, part, self._between.of(bucket), group, scattered),
            lambda: all_gather_blocks(transport, format, out, part, group, gathered, self._of_sums.of(bucket)),
        )
        return Handle(gathered, transport.ledger, steps.finish, steps.start_last)


def choose_route(groups: Groups, format: BlockFormat, order: StepsInOrder) -> Route:
    """Returns the route for `groups`: `BetweenGroups` if there are several shard groups."""

    def of_rank(kind: str, groups: Groups) -> bool:
        number, rank = kind.removeprefix(RESIDUAL), groups.rank
        # Residuals between groups continue on rank 0 if there is only one group now.
        return int(number) % groups.world_size == rank if number.isdigit() else groups.replicate.size == 1 and rank == 0

    def of_group(kind: str, groups: Groups) -> bool:
        replicate = groups.replicate
        return int(kind.removeprefix(BETWEEN)) % replicate.size == replicate.index

    def part_of_shard(bucket: Bucket) -> Interval:
        replicate = bucket.group.groups.replicate
        numel = bucket.own_interval.numel // replicate.size
        return Interval(0, numel).shift(bucket.own_interval.start + replicate.index * numel)

    whole = Residuals(
        kind=OF_RANKS,
        of_each=lambda own: (own.rank, own.world_size),
        interval_of=lambda bucket: Interval(0, bucket.layout.numel),
        begins=RESIDUAL,
        takes=of_rank,
    )
    within = Route(format, whole)
    if groups.replicate.size == 1:
        return within
    return BetweenGroups(
        format,
        within=within,
        between=Residuals(
            kind=OF_GROUPS,
            of_each=lambda own: (own.replicate.index, own.replicate.size),
            interval_of=lambda bucket: bucket.own_interval,
            begins=BETWEEN,
            takes=of_group,
        ),
        of_sums=Residuals(
            kind=OF_SUMS,
            of_each=lambda own: None,
            interval_of=part_of_shard,
            begins=OF_SUMS,
            takes=lambda kind, own: True,
        ),
        order=order,
    )


@dataclass(eq=False)
class _Sampling:
    """The samples of one group's buckets.

    Attributes:
        turn: number of the bucket that is sampled next.
        started: number of reductions that were started in this pass.
        norms: norms of the sample's error and of the exact sum, in this pass.
        squares: their squares, summed over the group, (2,) float64, until they are read.
        error: relative error of the last sample that was read.
    """

    turn: int = 0
    started: int = 0
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    squares: torch.Tensor | None = None
    error: float | None = None


class QuantizedReduction(Reduction):
    """A sum of quantized gradients with a sampled error. Nothing is quantized if one rank has all state of a bucket.

    Args:
        exact: the same sum without quantization, for the samples and for buckets that are not quantized.
    """

    def __init__(self, route: Route, exact: Reduction):
        super().__init__()
        self._route = route
        self._exact = exact
        self._passes = 0
        self._samplings = defaultdict[DataParallelGroup, _Sampling](_Sampling)

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        if bucket.group.groups.shard_size == 1:
            return self._exact.start(bucket, flat, out)
        sampling, transport = self._samplings[bucket.group], bucket.group.transport
        is_sampled = self._passes % _SAMPLED_PASSES == 0 and sampling.started == sampling.turn
        sampling.started += 1
        if not is_sampled:
            return self._route.start(bucket, flat, out)
        # The sample sums a clone, because the quantized reduction writes to `flat`.
        exact = torch.empty_like(out, dtype=torch.float32)
        sample = self._exact.start(bucket, flat.clone(), exact)
        handle = self._route.start(bucket, flat, out)

        def complete() -> None:
            sample.finish()
            handle.finish()
            sampling.norms = (torch.linalg.vector_norm(out.float() - exact), torch.linalg.vector_norm(exact))

        return Handle(bucket.labels["reduce-scatter of gradients"], transport.ledger, complete)

    def end_pass(self) -> None:
        for group, sampling in self._samplings.items():
            if sampling.norms is not None:
                # Not in `complete`, because ranks finish reductions in different orders.
                squares = torch.stack(sampling.norms).double().square()
                label = Label(kind="agreement on the error of a sample", subject="this pass")
                sampling.squares = group.transport.agree_sum(squares, label)
                sampling.turn = (sampling.turn + 1) % sampling.started
                sampling.norms = None
            sampling.started = 0
        self._passes += 1

    @property
    def held_bytes(self) -> int:
        return sum(residuals.held_bytes for residuals in self._route.residuals)

    @property
    def error(self) -> float | None:
        for sampling in self._samplings.values():
            if sampling.squares is not None:
                # Reading makes the host wait for the device, so do not read during a backward.
                lost, whole = sampling.squares.tolist()
                sampling.squares, sampling.error = None, (lost / whole) ** 0.5 if whole else 0.0
        return max((each.error for each in self._samplings.values() if each.error is not None), default=None)

    def rows(self) -> Iterator[StateRow]:
        for residuals in self._route.residuals:
            yield from residuals.rows()

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        sent_in_blocks = [bucket for bucket in buckets if bucket.group.groups.shard_size > 1]
        for residuals in self._route.residuals:
            residuals.fill(sent_in_blocks, read, kinds_of)


def quantized_reduction(comm: CommConfig, groups: Groups, order: StepsInOrder, exact: Reduction) -> QuantizedReduction:
    """Returns the reduction for `comm.gradients`. `exact`, `order`: see `QuantizedReduction` and `BetweenGroups`."""
    return QuantizedReduction(choose_route(groups, BlockFormat(), order), exact)
