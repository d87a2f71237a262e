"""Outer steps as the engine sees them: nothing where all ranks take each step together, else those of the extra `wire`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from ..buckets.bucket import Bucket
from ..buckets.rows import KindsOf, Read, StateRow
from ..comm.groups import RankGroup
from ..comm.transport import Transport
from ..config import CommConfig, OuterConfig
from ..extras import extra

AtHand = Callable[[Bucket], AbstractContextManager[None]]


class OuterSteps:
    """Brings models of other groups together: here nothing, since all ranks take each step together.

    Attributes:
        replica: which of the groups this rank is in.
    """

    replica = 0

    def after_step(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Follows a step of all `buckets` of an optimizer; returns the buckets that an outer step changed."""
        return []

    def finish(self) -> list[Bucket]:
        """Takes the outer steps that local steps are waiting for, before their time; returns the buckets changed. Collective."""
        return []

    def start_from_masters(self) -> None:
        """Called when masters have been replaced, in all groups by the same: they are the common model now."""

    def held_bytes(self, bucket: Bucket) -> int:
        """Bytes of the bucket's anchor and momentum, which lie where its master does."""
        return 0

    def rows(self) -> Iterator[StateRow]:
        """This rank's part of the momentum."""
        return iter(())

    def fill(self, read: Read, kinds_of: KindsOf) -> None:
        """Replaces the momentum by a checkpoint's; the arguments are `fill_rows`'s."""


def anchor_numel(shard_numel: int, among: RankGroup, outer: OuterConfig) -> int:
    """Counts elements of anchor and momentum on each of the ranks `among`, which hold the same shard."""
    return -(-shard_numel // among.size) * (2 if outer.momentum else 1)


def choose_outer(
    transport: Transport, among: RankGroup | None, comm: CommConfig, buckets: Sequence[Bucket], at_hand: AtHand
) -> OuterSteps:
    """Outer steps where there are groups to bring together. `at_hand`: see `Anchor`."""
    return OuterSteps() if among is None else extra("wire", "SyncedEvery")(transport, among, comm, buckets, at_hand)
