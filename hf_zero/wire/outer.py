"""Outer steps: shard groups train their models independently, and combine them every `comm.sync_every` steps.

This is DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105).
Each group performs H steps of the user's optimizer, starting from a common model, the anchor a. The difference a - mean(m), where
m are the resulting models, is the gradient of one step of SGD with Nesterov's momentum on a. All groups continue from its result.
With learning rate 1 and no momentum this is local SGD (Stich 2019, arXiv 1805.09767). Each group keeps its own optimizer state.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ..allocation import allocate
from ..buckets.bucket import Bucket
from ..buckets.rows import OUTER, KindsOf, Read, StateRow
from ..comm.groups import RankGroup
from ..comm.transport import Transport
from ..config import CommConfig, OuterConfig
from ..layout.intervals import Interval

AtHand = Callable[[Bucket], AbstractContextManager[None]]
_MOMENTUM = "momentum_buffer"
_KIND = f"{OUTER}{_MOMENTUM}"
_PARTS = 3
"""Label of the messages of a bucket's outer step."""


class Anchor:
    """One rank's part of the common model of a bucket, and the optimizer of the part.

    Attributes:
        own: the elements of the bucket's master in this part.
        values: (ceil(shard_numel / R),) of the master's dtype; elements past the end of the master are zero.
        steps: local steps since the last outer step.

    Args:
        at_hand: returns a context in which a bucket's master is in memory.
    """

    def __init__(self, bucket: Bucket, among: RankGroup, outer: OuterConfig, at_hand: AtHand):
        self._bucket = bucket
        self._at_hand = at_hand
        self._among = among
        numel = -(-bucket.master.numel() // among.size)
        start, stop = (min(bucket.master.numel(), index * numel) for index in (among.index, among.index + 1))
        self.own = Interval(start, stop)
        self.values = nn.Parameter(torch.zeros(numel, dtype=bucket.master.dtype, device=bucket.master.device))
        is_nesterov = outer.momentum > 0
        self._optimizer = torch.optim.SGD([self.values], lr=outer.lr, momentum=outer.momentum, nesterov=is_nesterov)
        self.start_from_master()

    def start_from_master(self) -> None:
        """Makes the current master the common model."""
        with self._at_hand(self._bucket):
            self.values.data[: self.own.numel].copy_(self._bucket.master[self.own.start : self.own.stop])
        self.steps = 0

    def step(self, transport: Transport) -> Iterator[None]:
        """Moves the anchor by the mean of the masters, then sets master and parameters to the anchor. Collective.

        A generator in three parts, so that other buckets can run in between: it starts the sum; it moves the anchor and sends it;
        it copies the received anchor into the master.
        """
        bucket, among, numel = self._bucket, self._among, self._bucket.layout.shard_numel
        # Allocate on the device of the parameters, because accelerators send from their own memory, wherever the masters are.
        flat = allocate(self.values.numel() * among.size, self.values.dtype, bucket.device)
        with self._at_hand(bucket):
            flat[:numel].copy_(bucket.master)
        flat[numel:].zero_()
        mean = torch.empty(self.values.numel(), dtype=self.values.dtype, device=bucket.device)
        label = bucket.labels["reduce-scatter of models"]
        models = transport.start_reduce_scatter(flat, mean, label, among=among)
        yield
        # The sum must be complete before the anchor moves.
        models.finish()
        self._move(mean.div_(among.size))
        own = flat.chunk(among.size)[among.index].copy_(self.values.data)
        anchors = transport.start_all_gather(flat, own, bucket.labels["all-gather of models"], among=among)
        yield
        anchors.finish()
        with self._at_hand(bucket):
            bucket.master.copy_(flat[:numel])
            # Parameters follow the master, because the next forward must start from the common model.
            bucket.write_back()
        self.steps = 0

    def _move(self, mean: torch.Tensor) -> None:
        self.values.grad = self.values.data - mean.to(self.values.device)
        self._optimizer.step()
        self.values.grad = None

    @property
    def nbytes(self) -> int:
        momentum = self.momentum
        return self.values.nbytes + (0 if momentum is None else momentum.nbytes)

    @property
    def momentum(self) -> torch.Tensor | None:
        """The momentum, with the shape of `values`; None before the first outer step, and without momentum."""
        return self._optimizer.state[self.values].get(_MOMENTUM)

    def drop_momentum(self) -> None:
        """Returns to the state before the first outer step."""
        self._optimizer.state.clear()

    def make_momentum(self) -> torch.Tensor:
        """Returns the momentum for writing, allocated if necessary."""
        return self._optimizer.state[self.values].setdefault(_MOMENTUM, torch.zeros_like(self.values.data))

    def pieces(self) -> Iterator[tuple[str, Interval, Interval]]:
        """Yields (parameter, interval of its elements, interval in `values`)."""
        for row in self._bucket.rows:
            common = row.layout.in_shard.intersect(self.own)
            if common is not None:
                in_parameter = common.shift(row.layout.in_parameter.start - row.layout.in_shard.start)
                yield row.slot.name, in_parameter, common.shift(-self.own.start)


class SyncedEvery:
    """Performs an outer step after every `sync_every` steps of an optimizer.

    If R groups hold the same shard, each rank has the anchor and the momentum of 1/R of its shard. The sum of the models is a
    reduce-scatter, and the new anchor is sent by an all-gather. Together they send 2(R-1)/R of the shard's bytes.

    Args:
        among: the ranks that hold this rank's shard, one of each group.
        buckets: their masters are equal in all groups when this object is made.
    """

    def __init__(
        self, transport: Transport, among: RankGroup, comm: CommConfig, buckets: Iterable[Bucket], at_hand: AtHand
    ):
        self._transport = transport
        self._sync_every = comm.sync_every
        self._has_momentum = comm.outer.momentum > 0
        self.replica = among.index
        self._anchors = {bucket: Anchor(bucket, among, comm.outer, at_hand) for bucket in buckets}

    def after_step(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Must be called after each step of an optimizer on all its `buckets`; returns the buckets changed by outer steps."""
        for bucket in buckets:
            self._anchors[bucket].steps += 1
        return self._step([bucket for bucket in buckets if self._anchors[bucket].steps == self._sync_every])

    def finish(self) -> list[Bucket]:
        """Performs pending outer steps early; returns the changed buckets. Collective."""
        return self._step([bucket for bucket, anchor in self._anchors.items() if anchor.steps])

    def _step(self, buckets: list[Bucket]) -> list[Bucket]:
        # Each bucket is one part later than the bucket before it, so that the link is busy with the next sum while a bucket
        # waits. Three buckets are active at a time, each with a copy of its master.
        steps = [self._anchors[bucket].step(self._transport) for bucket in buckets]
        for turn in range(len(steps) + _PARTS - 1):
            for step in reversed(steps[max(0, turn - _PARTS + 1) : turn + 1]):
                next(step, None)
        return buckets

    def start_from_masters(self) -> None:
        """Makes replaced masters, which are equal in all groups, the common model."""
        for anchor in self._anchors.values():
            anchor.start_from_master()

    def held_bytes(self, bucket: Bucket) -> int:
        """Bytes of the bucket's anchor and momentum, which are in the same memory as its master."""
        return self._anchors[bucket].nbytes

    def rows(self) -> Iterator[StateRow]:
        """Yields this rank's part of the momentum."""
        for anchor in self._anchors.values():
            momentum = anchor.momentum
            if momentum is None:
                continue
            for name, in_parameter, in_values in anchor.pieces():
                values = momentum[in_values.start : in_values.stop]
                yield StateRow(kind=_KIND, name=name, interval=in_parameter, own_shape=None, tensor=values)

    def fill(self, read: Read, kinds_of: KindsOf) -> None:
        """Replaces the momentum by the momentum of a checkpoint; for the arguments see `fill_rows`."""
        self.start_from_masters()
        for anchor in self._anchors.values() if self._has_momentum else ():
            anchor.drop_momentum()
            for name, in_parameter, in_values in anchor.pieces():
                if _KIND in kinds_of(name):
                    values = read(_KIND, name, in_parameter)
                    anchor.make_momentum()[in_values.start : in_values.stop].copy_(values)
