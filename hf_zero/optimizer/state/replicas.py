"""Checks every few steps that ranks which hold copies of the same parameters hold the same values.

Copies are whole parameters below stage 3, frozen ones among them, and at stage 3 the shards of ranks of a replicate group.
Copies go apart by a bit that flips in memory, by an edit on one rank alone, or by sums that are not made alike.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from ...buckets.bucket import Bucket
from ...buckets.memory import UnshardedMemory
from ...comm.transport import Transport

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LISTED = 8

_Group = tuple[int, int]


class ReplicasDivergedError(RuntimeError):
    """Ranks hold different values of the same parameters."""


class ReplicaCheck:
    """Compares checksums over the ranks.

    Args:
        every: steps between two comparisons; 0 for none.
        frozen: parameters of no bucket, by name.
        rank: this one.
        place_of: two numbers for a parameter: which part of it this rank's model has, and which shard of that this rank has.
    """

    def __init__(
        self,
        every: int,
        buckets: Sequence[Bucket],
        frozen: Iterable[tuple[str, nn.Parameter]],
        transport: Transport,
        rank: int,
        place_of: Callable[[nn.Parameter], tuple[int, int]],
    ):
        self._every = every
        self._buckets = buckets
        self._frozen = list(frozen)
        self._transport = transport
        self._rank = rank
        self._place_of = place_of

    def is_due(self, step: int) -> bool:
        """Whether copies are compared behind this step."""
        return self._every > 0 and step % self._every == 0

    @torch.no_grad()
    def compare(self, step: int) -> None:
        """Collective: one exchange of a number a bucket; raises `ReplicasDivergedError` on all ranks alike."""
        mine = [self._digest(bucket) for bucket in self._buckets]
        mine += [checksum(parameter.data) for _, parameter in self._frozen]
        found = torch.stack(mine).tolist() if mine else []
        everyone = self._transport.exchange((self._rank, self._groups(), found), "comparison of replicas")
        for index, (name, _) in enumerate(self._names()):
            values = {rank: (groups[index], theirs[index]) for rank, groups, theirs in everyone}
            if _differ(values):
                self._refuse(index, name, values, step)

    def _names(self) -> list[tuple[str, object]]:
        named: list[tuple[str, object]] = [(f"{bucket.name} ({bucket.contents})", bucket) for bucket in self._buckets]
        return [*named, *self._frozen]

    def _digest(self, bucket: Bucket) -> torch.Tensor:
        return checksum(bucket.flat if isinstance(bucket.memory, UnshardedMemory) else bucket.memory.read_own())

    def _groups(self) -> list[_Group]:
        """Of each bucket and frozen parameter: ranks with the same one hold copies of it."""
        of_buckets = [
            (part, 0 if isinstance(bucket.memory, UnshardedMemory) else shard)
            for bucket in self._buckets
            for part, shard in [self._place_of(bucket.slots[0].parameter)]
        ]
        return [*of_buckets, *((self._place_of(parameter)[0], 0) for _, parameter in self._frozen)]

    def _refuse(self, index: int, name: str, values: dict[int, tuple[_Group, int]], step: int) -> None:
        where = name if index < len(self._buckets) else repr(name)
        if index < len(self._buckets) and isinstance(self._buckets[index].memory, UnshardedMemory):
            first = self._first_parameter(self._buckets[index], [group for group, _ in values.values()])
            where = where if first is None else f"{first!r} in {self._buckets[index].name}"
        alike: dict[tuple[_Group, int], list[int]] = {}
        for rank, value in values.items():
            alike.setdefault(value, []).append(rank)
        apart = [ranks for value, ranks in alike.items() if len({v for g, v in values.values() if g == value[0]}) > 1]
        listed = "; ".join(_in_words(ranks) for ranks in sorted(apart, key=len, reverse=True)[:_LISTED])
        raise ReplicasDivergedError(
            f"hf_zero: the ranks' copies of the parameters have diverged by step {step}: the first that differs is {where}. "
            f"Ranks with the same values: {listed}. Resume from a checkpoint from before. Usual reasons: a parameter that was "
            "edited on some ranks only, or broken memory of the rank that stands alone."
        )

    def _first_parameter(self, bucket: Bucket, groups: Sequence[_Group]) -> str | None:
        mine = torch.stack([checksum(slot.view_of(bucket.flat)) for slot in bucket.slots]).tolist()
        everyone = self._transport.exchange(mine, "comparison of replicas")
        by_slot = zip(bucket.slots, zip(*everyone))
        return next((slot.name for slot, sums in by_slot if _differ(dict(enumerate(zip(groups, sums))))), None)


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Of a tensor's bits, an int64 scalar on its device; NaNs count by their bits."""
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    # Every other element counts once more, so that two that have changed places are seen.
    return bits.sum(dtype=torch.int64) * 31 + bits[::2].sum(dtype=torch.int64)


def _differ(values: dict[int, tuple[_Group, int]]) -> bool:
    return len(set(values.values())) > len({group for group, _ in values.values()})


def _in_words(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:_LISTED]))}{more}"
