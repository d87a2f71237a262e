"""What a collective of an accelerator's backend costs, and the size of buckets that follows from it.

[Note: the size of buckets]
A collective of b bytes takes latency + b / bandwidth. A model's gradients, n bytes, are reduced behind backward in n / b of
them. Where the links are what training waits for, all of it takes (n / b) x latency + n / bandwidth, and two parts more cannot
hide: backward computes the first b bytes before anything can start, and the last b bytes start when backward has ended. With
b / bandwidth for what the last one takes, the sum is least at b = sqrt(n x latency x bandwidth). Around there it is flat: half
or twice that size costs a quarter more of the parts that depend on b, so that constants need not be those of the very machine.

The constants are those that NCCL's own choice of algorithms is made by (NVIDIA/nccl, src/graph/tuning.cc, the tables baseLat
and hwLat, the ring with the protocol Simple): 8.4 us a collective, 3.4 us a step between neighbours on NVLink, 9.6 us a step
between nodes, and at most 235 GB/s that a ring moves inside a node of A100s. Between nodes each accelerator has a link of
200 Gbit/s, and a ring goes over all of a node's. Nobody has measured them with this package yet.
"""

import math
from dataclasses import dataclass

_CALL_S = 8.4e-6
_STEP_S = 3.4e-6
_STEP_BETWEEN_NODES_S = 9.6e-6
_BYTES_A_SECOND = 235e9
_LINK_BYTES_A_SECOND = 25e9


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """Of a reduce-scatter or an all-gather over a group of ranks."""

    latency_s: float
    bytes_a_second: float

    def seconds(self, nbytes: int) -> float:
        """For a collective of `nbytes` in all."""
        return self.latency_s + nbytes / self.bytes_a_second

    def bucket_bytes(self, total_bytes: int) -> int:
        """The size of a bucket at which reducing `total_bytes` of gradients ends soonest, see [Note: the size of buckets]."""
        return round(math.sqrt(total_bytes * self.latency_s * self.bytes_a_second))


def cost_of(*, ranks: int, nodes: int) -> CollectiveCost:
    """Of a ring over `ranks`, as many on each of `nodes`."""
    between = nodes - 1
    bandwidth = _BYTES_A_SECOND
    if between:
        bandwidth = min(bandwidth, _LINK_BYTES_A_SECOND * ranks / nodes)
    return CollectiveCost(
        latency_s=_CALL_S + (ranks - 1 - between) * _STEP_S + between * _STEP_BETWEEN_NODES_S,
        bytes_a_second=bandwidth,
    )
