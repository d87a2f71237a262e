"""Assigns parameters that may not be cut to buckets and to shards.

Collectives move equal shards, so each shard has the size of the fullest; the others are padded. Padding is small where a
bucket has several parameters a rank. A parameter larger than its rank's part of a bucket sets the size of all shards, and
others of its optimizer group are drawn in to fill them.
"""

import heapq
from collections.abc import Sequence


def group(numels: Sequence[int], *, bucket_numel: int, shards: int) -> list[list[int]]:
    """Groups parameters into buckets, as lists of their indices in ascending order.

    Args:
        numels: of each parameter, in the order in which gradients arrive.
        bucket_numel: elements a bucket should not pass, padding left out; it may where its largest parameter fills more
            than a shard.
    """
    left = dict.fromkeys(range(len(numels)))
    groups = []
    large = [index for index in left if numels[index] * shards > bucket_numel]
    for seed in sorted(large, key=lambda index: -numels[index]):
        # A larger seed may have drawn this one in to fill another shard.
        if seed in left:
            # Those that arrive next to it, so that the bucket is full soon after it could be.
            nearest = sorted(left, key=lambda index: abs(index - seed))
            groups.append(_take(nearest, left, numels, room=numels[seed] * shards, skips=True))
    while left:
        groups.append(_take(list(left), left, numels, room=bucket_numel, skips=False))
    return groups


def _take(candidates: list[int], left: dict[int, None], numels: Sequence[int], *, room: int, skips: bool) -> list[int]:
    """Moves candidates out of `left` while there is room. `skips`: passes over those that are too large."""
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


def aligned(value: int, to: int) -> int:
    """Rounds up to a multiple of `to`."""
    return -(-value // to) * to


def deal(numels: Sequence[int], *, shards: int, align_numel: int) -> list[tuple[int, int]]:
    """Returns (shard, first element) of each parameter: the largest first, each on the emptiest shard.

    Args:
        align_numel: parameters begin at multiples of this.

    Longest processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969; the fullest shard has at most
    4/3 of what the best deal could reach.
    """
    places = [(0, 0)] * len(numels)
    ends = [(0, shard) for shard in range(shards)]
    # Ties go by index and by shard, the same on every rank: ranks that disagreed on a place would add up different parameters.
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        end, shard = heapq.heappop(ends)
        places[index] = (shard, end)
        heapq.heappush(ends, (end + aligned(numels[index], align_numel), shard))
    return places
