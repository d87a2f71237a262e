"""Reductions of gradients in int8 or int4 blocks, with error feedback, and all-gathers of parameters in blocks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import RESIDUAL, KindsOf, Read, StateRow
from ..comm.groups import Groups, RankGroup
from ..comm.ledger import Label
from ..comm.transport import DataParallelGroup, Handle, StepsInOrder, Transport
from ..config import CommConfig
from ..device import allocate
from ..engine.collectives import GATHER, Gather, Reduction
from ..layout import Interval
from .quantise import BlockFormat, block_format, dequantise, dequantise_sum, quantise

# ---- Reduce-scatter and all-gather of blocks: the sender quantises once, the receiver dequantises once ----
#
# As in ZeRO++ (Wang et al. 2023, arXiv 2306.10209). Parts are summed in float32 in rank order, this rank's own part too: so
# the sum is the one that every other rank would have made. Codes and scales travel as two messages.

_SCALES_CHANNEL = 0x8000
"""Added to a bucket's channel, so that its scales are not taken for its codes."""


def reduce_scatter_blocks(
    transport: Transport,
    format: BlockFormat,
    flat: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    group: RankGroup,
    label: Label,
) -> Handle:
    """Sums `flat` (ranks x n elements, float32 or 16 bits) over a group; this rank's n elements land in `out`.

    Args:
        transport: moves codes and scales.
        format: parts must be whole blocks of it.
        out: may be this rank's part of `flat`, whose contents are not needed once this has returned.
        residual: like `flat`, float32 or bfloat16. Holds the rounding error of earlier calls, which is sent too, and takes the
            one of this call. None drops the error.
    """
    numel, device = flat.numel(), flat.device
    codes, received_codes = torch.empty((2, format.code_bytes(numel)), dtype=torch.uint8, device=device)
    scales, received_scales = torch.empty((2, format.blocks(numel)), dtype=torch.float32, device=device)
    quantise(flat, codes, scales, format, residual)
    handles = [
        transport.start_all_to_all(codes, received_codes, label, group),
        transport.start_all_to_all(scales, received_scales, _of_scales(label), group),
    ]

    def complete() -> None:
        for handle in handles:
            handle.finish()
        dequantise_sum(received_codes.view(group.size, -1), received_scales.view(group.size, -1), out, format)

    return Handle(label, transport.ledger, complete)


def all_gather_blocks(
    transport: Transport,
    format: BlockFormat,
    flat: torch.Tensor,
    own: torch.Tensor,
    group: RankGroup,
    label: Label,
    residual: torch.Tensor | None = None,
) -> Handle:
    """Fills `flat` (ranks x n elements) with each rank's dequantised `own` n elements, in the group's order.

    The owner of a part gets the dequantised values too, so that all ranks have the same bits.

    Args:
        transport, format, residual: as in `reduce_scatter_blocks`; `residual` is as `own`.
        own: may be this rank's part of `flat`, and is then overwritten.
    """
    device = flat.device
    codes = torch.empty(format.code_bytes(flat.numel()), dtype=torch.uint8, device=device)
    scales = torch.empty(format.blocks(flat.numel()), dtype=torch.float32, device=device)
    own_codes, own_scales = (part.view(group.size, -1)[group.index] for part in (codes, scales))
    quantise(own, own_codes, own_scales, format, residual)
    handles = [
        transport.start_all_gather(codes, own_codes, label, group),
        transport.start_all_gather(scales, own_scales, _of_scales(label), group),
    ]

    def complete() -> None:
        for handle in handles:
            handle.finish()
        dequantise(codes, scales, flat, format)

    return Handle(label, transport.ledger, complete)


def _of_scales(label: Label) -> Label:
    return replace(label, channel=label.channel + _SCALES_CHANNEL)


# ---- Reductions and gathers of buckets in blocks ----

# ---- Error feedback: what quantised reductions have not sent of gradients, kept between steps and in checkpoints ----
#
# [Note: residuals] A residual is what its rank has been given to send and has not sent, in units of the averaged gradient.
# Only the sum of all residuals ever reaches a parameter, so a run on other ranks, or on other groups of them, has to go on
# with the same sum: each saved residual is added to one of the new run's. Two things are let go: what had been left of a
# parameter that no rank uses in a pass, and, under a loss scale that changes, the difference once.

BETWEEN = f"{RESIDUAL}between."
"""Begins the kind of what has not been sent between shard groups; the number of the shard group follows, whose ranks have a
part each."""

OF_SUMS = f"{RESIDUAL}sums"
"""The kind of what has not been sent of the sums over all ranks, of which each rank has a part."""


class Residuals:
    """Those of one collective on this rank, one a bucket.

    Args:
        kind_in: of their rows in a checkpoint, by the ranks that share a bucket.
        interval_of: what of a bucket this rank sends.
        takes: of a saved kind, whether they are added to by it among those ranks.
    """

    def __init__(
        self,
        kind_in: Callable[[Groups], str],
        interval_of: Callable[[Bucket], Interval],
        takes: Callable[[str, Groups], bool],
    ):
        self._kind_in = kind_in
        self._interval_of = interval_of
        self._takes = takes
        self._of: dict[Bucket, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(residual.nbytes for residual in self._of.values())

    def of(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's, 1-D bfloat16, zeros at first."""
        if bucket not in self._of:
            self._of[bucket] = allocate(self._interval_of(bucket).numel, torch.bfloat16, bucket.device).zero_()
        return self._of[bucket]

    def rows(self) -> Iterator[StateRow]:
        """All of them, copied: the next backward writes into them, before the step up to which a save may take its time."""
        for bucket, residual in self._of.items():
            kind = self._kind_in(bucket.group.groups)
            for name, in_parameter, in_residual in self._cuts(bucket):
                yield StateRow(
                    kind=kind,
                    name=name,
                    interval=in_parameter,
                    own_shape=None,
                    tensor=residual[in_residual].to("cpu", copy=True),
                )

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces them by those of a checkpoint that they are to take; the arguments are `fill_rows`'s."""
        self._of.clear()
        for bucket in buckets:
            for name, in_parameter, in_residual in self._cuts(bucket):
                for kind in (kind for kind in kinds_of(name) if self._takes(kind, bucket.group.groups)):
                    place = self.of(bucket)[in_residual]
                    place.add_(read(kind, name, in_parameter).to(place.device))

    def _cuts(self, bucket: Bucket) -> Iterator[tuple[str, Interval, slice]]:
        """Yields name, interval of the parameter and slice of the residual, for each parameter in the residual."""
        interval = self._interval_of(bucket)
        for slot in bucket.slots:
            common = slot.interval.intersect(interval)
            if common is not None:
                here = common.shift(-interval.start)
                yield slot.name, common.shift(-slot.interval.start), slice(here.start, here.stop)


# ---- Sums of gradients that travel in blocks, inside a shard group and between shard groups ----

_SAMPLED_PASSES = 100
"""One bucket is reduced exactly as well in every so many backward passes."""


class Route:
    """The way of quantised gradients from every rank to those that own their sum: here a reduce-scatter, which quantises once.

    Args:
        residuals: laid out as buckets.

    Attributes:
        residuals: of each time that it quantises.
    """

    def __init__(self, format: BlockFormat, residuals: Residuals):
        self._format = format
        self._unsent = residuals
        self.residuals = [residuals]

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """As `Reduction.start`."""
        label, group, unsent = bucket.label("reduce-scatter gradients"), bucket.group, self._unsent.of(bucket)
        return reduce_scatter_blocks(group.transport, self._format, flat, out, unsent, group.groups.shard, label)


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
        scattered, gathered = (bucket.label(f"{verb} shards of gradients") for verb in ("reduce-scatter", "all-gather"))
        steps = self._order.begin(
            lambda: self._within.start(bucket, flat, out),
            lambda: reduce_scatter_blocks(transport, format, out, part, self._between.of(bucket), group, scattered),
            lambda: all_gather_blocks(transport, format, out, part, group, gathered, self._of_sums.of(bucket)),
        )
        return Handle(gathered, transport.ledger, steps.finish, steps.start_last)


def choose_route(groups: Groups, format: BlockFormat, order: StepsInOrder) -> Route:
    """Between groups where there are several."""

    def of_rank(kind: str, groups: Groups) -> bool:
        if not kind.startswith(RESIDUAL):
            return False
        number, rank = kind.removeprefix(RESIDUAL), groups.rank
        # Those of several groups, where there is one now, have no other place to go on from.
        return int(number) % groups.world_size == rank if number.isdigit() else groups.replicate.size == 1 and rank == 0

    def of_group(kind: str, groups: Groups) -> bool:
        replicate = groups.replicate
        return kind.startswith(BETWEEN) and int(kind.removeprefix(BETWEEN)) % replicate.size == replicate.index

    def part_of_shard(bucket: Bucket) -> Interval:
        replicate = bucket.group.groups.replicate
        numel = bucket.own_interval.numel // replicate.size
        return Interval(0, numel).shift(bucket.own_interval.start + replicate.index * numel)

    whole = Residuals(lambda own: f"{RESIDUAL}{own.rank}", lambda bucket: Interval(0, bucket.layout.numel), of_rank)
    within = Route(format, whole)
    if groups.replicate.size == 1:
        return within
    return BetweenGroups(
        format,
        within=within,
        between=Residuals(lambda own: f"{BETWEEN}{own.replicate.index}", lambda bucket: bucket.own_interval, of_group),
        of_sums=Residuals(lambda own: OF_SUMS, part_of_shard, lambda kind, own: kind == OF_SUMS),
        order=order,
    )


@dataclass(eq=False)
class _Sampling:
    """The samples of one group's buckets.

    Attributes:
        turn, started: the number of the bucket that is sampled next, and how many were started in this pass.
        norms: of what was lost of the pass's sample, and of all of it.
        squares: theirs over the group, (2,) float64, that nobody has read yet.
        error: of the last sample that was read.
    """

    turn: int = 0
    started: int = 0
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    squares: torch.Tensor | None = None
    error: float | None = None


class QuantisedReduction(Reduction):
    """A sum of quantised gradients that samples its own error. Where one rank has all of a bucket's state, nothing is quantised.

    Args:
        exact: the same sum without loss, for the samples and for such buckets.
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
        # The sample sums a clone: the quantised reduction writes into `flat`.
        exact = torch.empty_like(out, dtype=torch.float32)
        sample = self._exact.start(bucket, flat.clone(), exact)
        handle = self._route.start(bucket, flat, out)

        def complete() -> None:
            sample.finish()
            handle.finish()
            sampling.norms = (torch.linalg.vector_norm(out.float() - exact), torch.linalg.vector_norm(exact))

        return Handle(bucket.label("reduce-scatter gradients"), transport.ledger, complete)

    def end_pass(self) -> None:
        for group, sampling in self._samplings.items():
            if sampling.norms is not None:
                # Not where it was taken: ranks finish reductions in orders of their own.
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
                # The host waits for the device here, and not in a backward.
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


def quantised_reduction(comm: CommConfig, groups: Groups, order: StepsInOrder, exact: Reduction) -> QuantisedReduction:
    """The reduction that `comm.gradients` asks for. `exact`, `order`: see `QuantisedReduction` and `BetweenGroups`."""
    return QuantisedReduction(choose_route(groups, block_format(comm.gradients), order), exact)


# ---- All-gathers of parameters in blocks ----


class QuantisedGather(Gather):
    """Gathers parameters as dequantised blocks, the same values on every rank, this rank's own part included.

    Where a bucket's `source` lies in its `flat` it is overwritten, so what it was made from must be elsewhere.
    """

    takes_edits = False

    def __init__(self, format: BlockFormat):
        super().__init__()
        self._format = format

    def start(self, bucket: Bucket) -> Handle:
        group = bucket.group
        if group.groups.shard_size == 1 or bucket.key.is_packed:
            return super().start(bucket)
        flat, own, label = bucket.flat, bucket.memory.source, bucket.label(GATHER)
        return all_gather_blocks(group.transport, self._format, flat, own, group.groups.gather, label)
