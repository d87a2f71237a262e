"""The sizes of buckets and units, derived from the cost of a collective."""

import math
import sys
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.groups import Groups
from ..config import AUTO, ZeroConfig
from .kept_dtypes import GatheredDtypes
from .precision import resolve_precision
from .unread_weights import wanted_dtype

# [Note: the size of buckets] A collective of b bytes takes latency + b / bandwidth. During backward, n bytes of gradients are
# reduced in n / b buckets. If the links are the bottleneck, all buckets cost (n / b) x latency + n / bandwidth. Two
# more parts cannot be hidden: backward computes the first b bytes before any reduction starts, and the reduction of the last b
# bytes starts after backward has ended. With b / bandwidth for the last reduction, the sum is smallest at b = sqrt(n x latency
# x bandwidth). The minimum is flat: half or twice the size adds a quarter to the parts that depend on b, so the constants
# need not match the machine.
#
# The constants are from NCCL's own choice of algorithms (NVIDIA/nccl, src/graph/tuning.cc, tables baseLat and hwLat, ring
# algorithm with the protocol Simple): 8.4 us per collective, 3.4 us per step between neighbors on NVLink, 9.6 us per step
# between nodes, and a ring bandwidth of at most 235 GB/s within a node of A100s. Between nodes each accelerator has a link of
# 200 Gbit/s, and a ring uses all links of a node. The constants have not been measured with this package.
_CALL_S = 8.4e-6

_STEP_S = 3.4e-6

_STEP_BETWEEN_NODES_S = 9.6e-6

_BYTES_A_SECOND = 235e9

_LINK_BYTES_A_SECOND = 25e9


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """The cost of a reduce-scatter or an all-gather over a group of ranks."""

    latency_s: float
    bytes_a_second: float

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_a_second

    def bucket_bytes(self, total_bytes: int) -> int:
        """Returns the bucket size at which reducing `total_bytes` ends earliest; see [Note: the size of buckets]."""
        return round(math.sqrt(total_bytes * self.latency_s * self.bytes_a_second))


def cost_of(*, ranks: int, nodes: int) -> CollectiveCost:
    """Estimates a ring over `ranks` ranks, equally many on each of `nodes` nodes."""
    between = nodes - 1
    bandwidth = _BYTES_A_SECOND
    if between:
        # Each rank of a node has a link, and the ring uses all of them; the slower of link and node limits the ring.
        bandwidth = min(bandwidth, _LINK_BYTES_A_SECOND * ranks / nodes)
    return CollectiveCost(
        latency_s=_CALL_S + (ranks - 1 - between) * _STEP_S + between * _STEP_BETWEEN_NODES_S,
        bytes_a_second=bandwidth,
    )


_MIB = 2**20

_SMALLEST_BYTES = 1 * _MIB

_LARGEST_BYTES = 25 * _MIB

_BUCKETS_A_MODEL = 8

_LARGEST_UNIT_BYTES = 32 * _MIB
"""On the host, a stage 3 unit is one bucket of each kind if it fits in this size: a layer of BERT-base has 28 MiB."""


_LARGEST_QUEUED_BYTES = 256 * _MIB
"""Limits the memory of the `GRAD_BUFFERS` in flight on an accelerator: a 7B model in bfloat16 then has 67 buckets."""


SMALLEST_UNIT_BYTES = {"cpu": 1 * _MIB, "accelerator": 16 * _MIB}
"""[Note: the least bytes of a unit]
The two gathers and the reduction of a unit cost Python about half a millisecond per step, independent of their size. In this
time gloo sends about 1 MiB, and NVLink some 100 MB. But gathered units need memory, and two or three exist at a time. 16 MiB,
less than a layer of BERT-base in float32, is negligible on a GPU and joins the layers of smaller models.
"""


_ANY = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class BucketSizes:
    """The maximum size of a bucket, in elements.

    Attributes:
        layer_numel: for a layer's buckets at stage 3.
        numel: for all other buckets.
    """

    numel: int
    layer_numel: int


def choose_sizes(model: nn.Module, config: ZeroConfig, groups: Groups, device: torch.device) -> BucketSizes:
    """Chooses the bucket sizes for a model. `bucket_bytes` refers to the smallest dtype of `reduce`.

    With `auto` on the host, see [Note: buckets on the host]. With `auto` on several accelerators, a stage 3 layer is one
    bucket of each kind regardless of its size, because it is gathered and reduced as a whole; other buckets have the cheapest
    size, see [Note: the size of buckets].
    """
    # All parameters if none is trained: stage 3 also has buckets of frozen parameters, and `min` below needs at least one.
    trained = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
    gathered = GatheredDtypes(model, config)
    dtypes = {p: (wanted_dtype(p), gathered.of(p, sharded=config.stage == 3)) for p in trained}
    itemsize = {of: resolve_precision(config, of[0], gathered=of[1]).reduce.itemsize for of in set(dtypes.values())}
    smallest = min(itemsize.values())
    total_bytes = sum(p.numel() * itemsize[dtypes[p]] for p in trained)
    if isinstance(config.bucket_bytes, int):
        numel = max(1, config.bucket_bytes // smallest)
        return BucketSizes(numel=numel, layer_numel=numel)
    if device.type == "cpu":
        numel = (_LARGEST_UNIT_BYTES if config.stage == 3 else bytes_on_host(total_bytes)) // smallest
        return BucketSizes(numel=numel, layer_numel=numel)
    numel = bytes_on_accelerators(total_bytes, groups) // smallest
    return BucketSizes(numel=numel, layer_numel=numel if groups.world_size == 1 else _ANY)


def least_unit_bytes(config: ZeroConfig, device: torch.device) -> int:
    """Returns the bytes below which consecutive layers are joined into one unit; see [Note: the least bytes of a unit]."""
    if isinstance(config.unit_bytes, int):
        return config.unit_bytes
    if config.unit_modules != AUTO:
        return 0
    return SMALLEST_UNIT_BYTES["cpu" if device.type == "cpu" else "accelerator"]


def bytes_on_host(total_bytes: int) -> int:
    """Returns the size for about eight buckets per model, between 1 MiB (calls cost) and 25 MiB (the last one is exposed).

    [Note: buckets on the host]
    Over gloo, buckets of 16 to 32 MB needed the same CPU time per step as DDP, buckets of 4 MB 5 % more, and buckets of 1 MB 7
    % more (a GPT-2 with 30 M parameters, two ranks on two cores).
    """
    return min(_LARGEST_BYTES, max(_SMALLEST_BYTES, total_bytes // _BUCKETS_A_MODEL))


def bytes_on_accelerators(total_bytes: int, groups: Groups) -> int:
    """Returns the cheapest size for the group of ranks in a reduction, up to 256 MiB and an eighth of all gradients.

    With larger buckets, the `GRAD_BUFFERS` would hold most of the gradients, which stage 2 is meant to free. A single rank
    sends nothing and gets the largest size, because each bucket costs the host some 150 us per step.
    """
    largest = min(_LARGEST_QUEUED_BYTES, total_bytes // _BUCKETS_A_MODEL)
    if groups.world_size == 1:
        return max(_SMALLEST_BYTES, largest)
    # A shard group of one rank sends nothing; the replicas all-reduce whole gradients.
    group = groups.shard if groups.shard.size > 1 else groups.replicate
    nodes = len({groups.nodes[rank] for rank in group.ranks})
    wanted = cost_of(ranks=group.size, nodes=nodes).bucket_bytes(total_bytes)
    return max(_SMALLEST_BYTES, min(largest, wanted))
