"""Sums of gradients that travel in blocks, inside a shard group and between shard groups."""

from collections.abc import Callable, Iterable, Iterator

import torch

from ...buckets.bucket import Bucket
from ...buckets.rows import RESIDUAL, KindsOf, Read, StateRow
from ...comm.groups.groups import Groups
from ...comm.quantised import QuantisedAllGather, QuantisedReduceScatter
from ...comm.steps import StepsInOrder
from ...comm.transport import Handle, Label, Transport
from ...kernels.quantise import BlockFormat
from ...layout.intervals import Interval
from .reductions import Reduction
from .residuals import BETWEEN, OF_SUMS, Residuals

_SAMPLED_PASSES = 100
"""One bucket is reduced exactly as well in every so many backward passes."""


class Route:
    """The way of quantised gradients from every rank to those that own their sum: here a reduce-scatter, which quantises once.

    Args:
        residuals: laid out as buckets.

    Attributes:
        residuals: of each time that it quantises.
    """

    def __init__(self, transport: Transport, groups: Groups, format: BlockFormat, residuals: Residuals):
        self._groups = groups
        self._collective = QuantisedReduceScatter(transport, format)
        self._unsent = residuals
        self.residuals = [residuals]

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """As `Reduction.start`."""
        label = bucket.label("reduce-scatter gradients")
        return self._collective.start(flat, out, self._unsent.of(bucket), self._groups.shard, label)


class BetweenGroups(Route):
    """A reduce-scatter inside the shard group, then of each shard over its replicate group, and an all-gather back.

    All three are quantised (ZeRO++'s qgZ, Wang et al. 2023, arXiv 2306.10209, has the first two). Of a bucket with n elements
    in R groups of S ranks, codes and scales of 2(R-1)/R x n/S elements go from a rank to other groups. What the ranks of a
    replicate group gather they dequantise from the same codes, so that they go on alike to the last bit.

    Args:
        within: the first of the three.
        between, of_sums: residuals of the other two, laid out as a rank's shards and as its parts of those.
        order: that all steps between ranks of a replicate group are started in.
    """

    def __init__(
        self,
        transport: Transport,
        groups: Groups,
        format: BlockFormat,
        *,
        within: Route,
        between: Residuals,
        of_sums: Residuals,
        order: StepsInOrder,
    ):
        self._transport = transport
        self._replicate = groups.replicate
        self._within = within
        self._scatter = QuantisedReduceScatter(transport, format)
        self._gather = QuantisedAllGather(transport, format)
        self._between = between
        self._of_sums = of_sums
        self._order = order
        self.residuals = [*within.residuals, between, of_sums]

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        group = self._replicate
        part = out.view(group.size, -1)[group.place]
        scattered, gathered = (bucket.label(f"{verb} shards of gradients") for verb in ("reduce-scatter", "all-gather"))
        finish = self._order.begin(
            lambda: self._within.start(bucket, flat, out),
            lambda: self._scatter.start(out, part, self._between.of(bucket), group, scattered),
            lambda: self._gather.start(out, part, group, gathered, self._of_sums.of(bucket)),
        )
        return Handle(gathered, self._transport.ledger, finish)


def choose_route(
    transport: Transport, groups: Groups, format: BlockFormat, order: StepsInOrder, *, error_feedback: bool
) -> Route:
    """Between groups where there are several.

    Args:
        error_feedback: False lets go what quantising loses.
    """
    rank, replicate = groups.rank, groups.replicate

    def of_rank(kind: str) -> bool:
        if not kind.startswith(RESIDUAL):
            return False
        number = kind.removeprefix(RESIDUAL)
        # Those of several groups, where there is one now, have no other place to go on from.
        return int(number) % groups.world_size == rank if number.isdigit() else replicate.size == 1 and rank == 0

    def of_group(kind: str) -> bool:
        return kind.startswith(BETWEEN) and int(kind.removeprefix(BETWEEN)) % replicate.size == replicate.place

    def part_of_shard(bucket: Bucket) -> Interval:
        numel = bucket.own_interval.numel // replicate.size
        return Interval(0, numel).shift(bucket.own_interval.start + replicate.place * numel)

    def make(kind: str, interval_of: Callable[[Bucket], Interval], takes: Callable[[str], bool]) -> Residuals:
        return Residuals(kind, interval_of, takes, kept=error_feedback)

    whole = make(f"{RESIDUAL}{rank}", lambda bucket: Interval(0, bucket.layout.numel), of_rank)
    within = Route(transport, groups, format, whole)
    if replicate.size == 1:
        return within
    return BetweenGroups(
        transport,
        groups,
        format,
        within=within,
        between=make(f"{BETWEEN}{replicate.place}", lambda bucket: bucket.own_interval, of_group),
        of_sums=make(OF_SUMS, part_of_shard, lambda kind: kind == OF_SUMS),
        order=order,
    )


class QuantisedReduction(Reduction):
    """A sum of quantised gradients that samples its own error.

    Args:
        sample: the same sum without loss, for the samples.
    """

    def __init__(self, transport: Transport, route: Route, sample: Reduction):
        super().__init__(transport)
        self.adds_in_wider = True
        self._route = route
        self._reference = sample
        # Squares of what was lost of the last sample and of all of it, (2,) float64, that nobody has read yet.
        self._squares: torch.Tensor | None = None
        self._error: float | None = None
        self._passes = self._started = self._turn = 0
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        is_sampled = self._passes % _SAMPLED_PASSES == 0 and self._started == self._turn
        self._started += 1
        if not is_sampled:
            return self._route.start(bucket, flat, out)
        exact = torch.empty_like(out, dtype=torch.float32)
        sample = self._reference.start(bucket, flat.clone(), exact)
        handle = self._route.start(bucket, flat, out)

        def complete() -> None:
            sample.finish()
            handle.finish()
            self._sample = (torch.linalg.vector_norm(out.float() - exact), torch.linalg.vector_norm(exact))

        return Handle(bucket.label("reduce-scatter gradients"), self._transport.ledger, complete)

    def end_pass(self) -> None:
        if self._sample is not None:
            # Not where it was taken: ranks finish reductions in orders of their own.
            squares = torch.stack(self._sample).double().square()
            label = Label(kind="agreement on the error of a sample", subject="this pass")
            self._squares = self._transport.agree_sum(squares, label)
            self._turn = (self._turn + 1) % self._started
            self._sample = None
        self._passes += 1
        self._started = 0

    @property
    def held_bytes(self) -> int:
        return sum(residuals.held_bytes for residuals in self._route.residuals)

    @property
    def error(self) -> float | None:
        if self._squares is not None:
            # The host waits for the device here, and not in a backward.
            lost, whole = self._squares.tolist()
            self._squares, self._error = None, (lost / whole) ** 0.5 if whole else 0.0
        return self._error

    def rows(self) -> Iterator[StateRow]:
        for residuals in self._route.residuals:
            yield from residuals.rows()

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        for residuals in self._route.residuals:
            residuals.fill(buckets, read, kinds_of)
