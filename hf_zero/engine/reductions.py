"""How a filled gradient buffer becomes this rank's part of the sum: an object chosen once when the engine is built."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch

from ..comm.groups import Groups
from ..comm.quantised import QuantisedReduceScatter
from ..comm.transport import Handle, Label, Transport
from ..device import allocate
from ..kernels.quantise import BlockFormat
from ..layout.intervals import Interval
from .buckets import Bucket
from .state_rows import RESIDUAL, KindsOf, Read, StateRow

_SAMPLED_PASSES = 100
"""One bucket is reduced exactly as well in every so many backward passes."""


class Reduction(ABC):
    """Sums buckets over the ranks. Between passes it may keep state of its own, which goes into checkpoints."""

    @abstractmethod
    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """Starts the sum of `flat` (numel,) over the ranks; this rank's (shard_numel,) of it land in `out`.

        `out` may be this rank's part of `flat`, whose contents are undefined afterwards.
        """

    @abstractmethod
    def end_pass(self) -> None:
        """Called on every rank when all reductions of a backward pass have ended."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of lasting state."""

    @property
    @abstractmethod
    def error(self) -> float | None:
        """Relative error of a reduced gradient that was sampled lately; None where nothing is lost."""

    @abstractmethod
    def rows(self) -> Iterator[StateRow]:
        """This rank's lasting state, copied."""

    @abstractmethod
    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces lasting state by a checkpoint's; the arguments are `fill_rows`'s."""


class _Lossless(Reduction):
    """Nothing is lost, and nothing has to be kept."""

    held_bytes = 0
    error = None

    def end_pass(self) -> None:
        """There is nothing to measure."""

    def rows(self) -> Iterator[StateRow]:
        return iter(())

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """What another run has not sent stays unsent: at most half a step of its blocks."""


class ExactReduction(_Lossless):
    """A reduce-scatter of the gradients as they are."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        return self._transport.start_reduce_scatter(flat, out, bucket.label("reduce-scatter gradients"))


class ReplicatedReduction(_Lossless):
    """An all-reduce, where every rank steps all parameters, on gradients in other memory than the buckets."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label = bucket.label("all-reduce gradients")
        handle = self._transport.start_all_reduce(flat, label)

        def complete() -> None:
            handle.finish()
            out.copy_(flat)

        return Handle(label, self._transport.ledger, complete)


class QuantisedReduction(Reduction):
    """A reduce-scatter of quantised gradients, with or without error feedback, that samples its own error.

    [Note: residuals]
    A rank's residual is what it has been given to send and has not sent, of whole buckets and in units of the averaged
    gradient. Only their sum over the ranks ever reaches a parameter. So a run on W ranks that goes on on V ranks gives rank
    v the sum of the residuals of the ranks v, v + V, v + 2V, …: the sum stays what it was. Two things are let go: what had
    been left of a parameter that no rank uses in a pass, and, under a loss scale that changes, the difference once.

    Args:
        error_feedback: False lets go what quantising loses.
    """

    def __init__(self, transport: Transport, groups: Groups, format: BlockFormat, *, error_feedback: bool):
        self._transport = transport
        self._groups = groups
        self._collective = QuantisedReduceScatter(transport, format)
        self._error_feedback = error_feedback
        self._residuals: dict[Bucket, torch.Tensor] = {}
        self._error: float | None = None
        self._passes = self._started = self._turn = 0
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        is_sampled = self._passes % _SAMPLED_PASSES == 0 and self._started == self._turn
        self._started += 1
        ranks, label = self._groups.shard_size, bucket.label("reduce-scatter gradients")
        if not is_sampled:
            return self._collective.start(flat, out, self._residual(bucket), ranks, label)
        exact = torch.empty_like(out, dtype=torch.float32)
        sample = self._transport.start_reduce_scatter(flat.clone(), exact, bucket.label("reduce-scatter a sample"))
        handle = self._collective.start(flat, out, self._residual(bucket), ranks, label)

        def complete() -> None:
            sample.finish()
            handle.finish()
            self._sample = (torch.linalg.vector_norm(out.float() - exact), torch.linalg.vector_norm(exact))

        return Handle(label, self._transport.ledger, complete)

    def end_pass(self) -> None:
        if self._sample is not None:
            # Not where it was taken: ranks finish reductions in orders of their own.
            squares = torch.stack(self._sample).double().square()
            label = Label(kind="agree on the error of a sample", subject="this pass")
            lost, whole = self._transport.agree_sum(squares, label).tolist()
            self._error = (lost / whole) ** 0.5 if whole else 0.0
            self._turn = (self._turn + 1) % self._started
            self._sample = None
        self._passes += 1
        self._started = 0

    @property
    def held_bytes(self) -> int:
        return sum(residual.nbytes for residual in self._residuals.values())

    @property
    def error(self) -> float | None:
        return self._error

    def rows(self) -> Iterator[StateRow]:
        for bucket, residual in self._residuals.items():
            for slot in bucket.slots:
                yield StateRow(
                    kind=f"{RESIDUAL}{self._groups.rank}",
                    name=slot.name,
                    interval=Interval(0, slot.interval.numel),
                    own_shape=None,
                    # The next backward writes into it, before the step up to which a save may take its time.
                    tensor=slot.view_of(residual).reshape(-1).to("cpu", copy=True),
                )

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        self._residuals.clear()
        for slot in (slot for bucket in buckets for slot in bucket.slots if self._error_feedback):
            for kind in kinds_of(slot.name):
                if kind.startswith(RESIDUAL) and self._is_heir(int(kind.removeprefix(RESIDUAL))):
                    values = read(kind, slot.name, Interval(0, slot.interval.numel))
                    place = slot.view_of(self._residual(slot.bucket))
                    place.add_(values.view(place.shape).to(place.device))

    def _is_heir(self, rank: int) -> bool:
        return rank % self._groups.world_size == self._groups.rank

    def _residual(self, bucket: Bucket) -> torch.Tensor | None:
        if not self._error_feedback:
            return None
        if bucket not in self._residuals:
            self._residuals[bucket] = allocate(bucket.layout.numel, torch.bfloat16, bucket.device).zero_()
        return self._residuals[bucket]


class HybridReduction(_Lossless):
    """A sum inside the shard group, and then of each shard over its replicate group.

    Hybrid sharding: Zhang et al. 2022, "MiCS", arXiv 2205.00119. Of a bucket with n elements in shard groups of S ranks, of
    which there are R, 2(R-1)/R x n/S elements go between the groups.

    [Note: the order of all-reduces]
    A bucket's all-reduce can start when its sum inside the shard group has ended. Nobody watches for that moment: it is
    looked at when the next bucket starts, or when the bucket is needed. So all ranks start all-reduces in the buckets'
    order, and all but the last run behind backward.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._within = ExactReduction(transport)
        self._latest: _InTwoSteps | None = None

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        if self._latest is not None:
            self._latest.advance()
        within = self._within.start(bucket, flat, out)
        label = bucket.label("all-reduce shards of gradients")
        self._latest = steps = _InTwoSteps(within, lambda: self._transport.start_all_reduce(out, label))
        return Handle(label, self._transport.ledger, steps.finish)

    def end_pass(self) -> None:
        self._latest = None


class _InTwoSteps:
    """A collective, and another that needs its result."""

    def __init__(self, first: Handle, start_second: Callable[[], Handle]):
        self._first = first
        self._start_second = start_second
        self._second: Handle | None = None

    def advance(self) -> None:
        """Waits for the first and starts the second, once."""
        if self._second is None:
            self._first.finish()
            self._second = self._start_second()

    def finish(self) -> None:
        self.advance()
        self._second.finish()
