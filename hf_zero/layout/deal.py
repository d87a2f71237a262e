"""Parameters that may not be cut: which share a bucket, and on which shard of it each lies.

A bucket's shards are equal, since that is what collectives move, so each has the size of the fullest; what the others lack
is padding. It is small where a bucket has several parameters a rank. A parameter larger than its rank's part of a bucket
sets the size of all shards, and others of its optimizer group are drawn in to fill them.
"""

import heapq
from collections.abc import Sequence


def group(numels: Sequence[int], *, bucket_numel: int, shards: int) -> list[list[int]]:
    """Which parameters share a bucket, as lists of their indices in ascending order.

    Args:
        numels: of each parameter, in the order in which gradients arrive.
        bucket_numel: elements a bucket should not pass, padding left out; it may where its largest parameter fills more
            than a shard.
    """
    left = dict.fromkeys(range(len(numels)))
    groups = []
    large = [index for index in left if numels[index] * shards > bucket_numel]
    for seed in sorted(large, key=lambda index: -numels[index]):
        if seed in left:
            # Those that arrive next to it, so that the bucket is full soon after it could be.
            nearest = sorted(left, key=lambda index: abs(index - seed))
            groups.append(_take(nearest, left, numels, room=numels[seed] * shards, skips=True))
    while left:
        groups.append(_take(list(left), left, numels, room=bucket_numel, skips=False))
    return groups


def _take(candidates: list[int], left: dict[int, None], numels: Sequence[int], *, room: int, skips: bool) -> list[int]:
    """Moves candidates out of `left` while there is room; `skips`: past those that are too large."""
    taken: list[int] = []
    total = 0
    for index in candidates:
        if taken and total + numels[index] > room:
            if skips:
                continue
            break
        taken.append(index)
        total += numels[index]
        del left[index]
    return sorted(taken)


def deal(numels: Sequence[int], *, shards: int, align_numel: int) -> list[tuple[int, int]]:
    """(shard, first element in it) of each parameter: the largest first, each to the emptiest shard.

    Args:
        align_numel: parameters begin at multiples of this.

    Longest processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969; the fullest shard has at most
    4/3 of what the best deal could reach.
    """
    places = [(0, 0)] * len(numels)
    ends = [(0, shard) for shard in range(shards)]
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        end, shard = heapq.heappop(ends)
        places[index] = (shard, end)
        heapq.heappush(ends, (end + -(-numels[index] // align_numel) * align_numel, shard))
    return places
