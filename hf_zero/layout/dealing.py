"""Assigns uncuttable parameters to buckets and to shards.

Collectives move shards of equal size, so the fullest shard sets the size and the others are padded. Padding is small if a bucket
has several parameters for each rank. A parameter larger than one rank's part of a bucket increases the size of all shards, so
other parameters of its optimizer group are moved into the same bucket to fill them.
"""

import heapq
from collections.abc import Sequence


def group(numels: Sequence[int], *, bucket_numel: int, shards: int) -> list[list[int]]:
    """Groups parameters into buckets, as lists of their indices in ascending order.

    Args:
        numels: elements of each parameter, in the order in which gradients arrive.
        bucket_numel: target size of a bucket in elements, without padding. A bucket is larger if its largest parameter fills more
            than one shard.
    """
    left = dict.fromkeys(range(len(numels)))
    groups = []
    large = [index for index in left if numels[index] * shards > bucket_numel]
    for seed in sorted(large, key=lambda index: -numels[index]):
        # An earlier, larger seed may already have used this parameter as filling.
        if seed in left:
            # Prefer parameters with gradients arriving at about the same time, so the bucket completes early.
            nearest = sorted(left, key=lambda index: abs(index - seed))
            groups.append(_take(nearest, left, numels, room=numels[seed] * shards, skips=True))
    while left:
        groups.append(_take(list(left), left, numels, room=bucket_numel, skips=False))
    return groups


def _take(candidates: list[int], left: dict[int, None], numels: Sequence[int], *, room: int, skips: bool) -> list[int]:
    """Moves candidates out of `left` until `room` elements are used. `skips`: passes over candidates too large for the room."""
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
    """Rounds `value` up to a multiple of `to`."""
    return -(-value // to) * to


def deal(numels: Sequence[int], *, shards: int, align_numel: int) -> list[tuple[int, int]]:
    """Returns (shard, first element) of each parameter: the largest parameter first, each on the emptiest shard.

    This is longest-processing-time-first scheduling (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969); the fullest
    shard has at most 4/3 of the optimal size.

    Args:
        align_numel: parameters start at multiples of this.
    """
    places = [(0, 0)] * len(numels)
    ends = [(0, shard) for shard in range(shards)]
    # Break ties by index and by shard, because otherwise ranks could disagree and add gradients of different parameters.
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        end, shard = heapq.heappop(ends)
        places[index] = (shard, end)
        heapq.heappush(ends, (end + aligned(numels[index], align_numel), shard))
    return places
