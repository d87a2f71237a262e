"""How large buckets and units are: what `bucket_bytes` and `unit_bytes` say, or what suits model, ranks and device."""

import sys
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.cost import cost_of
from ..comm.groups.groups import Groups
from ..config import AUTO, ZeroConfig
from .gathered_dtypes import GatheredDtypes
from .mapped_parameters import wanted_dtype
from .precision import resolve_precision

_MIB = 2**20
_SMALLEST_BYTES = 1 * _MIB
_LARGEST_BYTES = 25 * _MIB
_BUCKETS_A_MODEL = 8
_LARGEST_UNIT_BYTES = 32 * _MIB
"""On the host a unit of stage 3 is a bucket of each kind where it fits: a layer of BERT-base has 28 MiB."""

_LARGEST_QUEUED_BYTES = 256 * _MIB
"""On an accelerator, for the memory of the `GRAD_BUFFERS` that pass at a time: a 7B model in bfloat16 has 67 buckets then."""

SMALLEST_UNIT_BYTES = {"cpu": 1 * _MIB, "accelerator": 16 * _MIB}
"""[Note: the least bytes of a unit]
Two gathers and a reduction of a unit take Python about half a millisecond a step, whatever they carry. In that time gloo sends
about 1 MiB, and NVLink some 100 MB. But gathered units take memory, and two or three exist at a time: 16 MiB, less than a layer
of BERT-base in float32, is nothing that anybody would miss on a GPU, and joins the layers of smaller models.
"""

_ANY = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class BucketSizes:
    """Elements that a bucket should not pass.

    Attributes:
        layer_numel: of a layer's buckets at stage 3.
        numel: of all others.
    """

    numel: int
    layer_numel: int


def choose_sizes(model: nn.Module, config: ZeroConfig, groups: Groups, device: torch.device) -> BucketSizes:
    """The sizes for a model; those that `bucket_bytes` says are of the smallest dtype in which gradients travel.

    With `auto`, on the host: [Note: buckets on the host]. On several accelerators a layer of stage 3 is one bucket of each kind,
    whatever its size, since it is gathered and reduced as a whole; others have the size that costs least by comm/cost.py.
    """
    trained = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
    gathered = GatheredDtypes(model, config)
    # What `persist_below_numel` keeps whole is small.
    dtypes = {p: (wanted_dtype(p), gathered.of(p, sharded=config.stage == 3)) for p in trained}
    itemsize = {of: resolve_precision(config, of[0], gathered=of[1]).reduce.itemsize for of in set(dtypes.values())}
    smallest = min(itemsize.values())
    total_bytes = sum(p.numel() * itemsize[dtypes[p]] for p in trained)
    if isinstance(config.bucket_bytes, int):
        numel = max(1, config.bucket_bytes // smallest)
        return BucketSizes(numel=numel, layer_numel=numel)
    if device.type == "cpu" or groups.world_size == 1:
        numel = (_LARGEST_UNIT_BYTES if config.stage == 3 else bytes_on_host(total_bytes)) // smallest
        return BucketSizes(numel=numel, layer_numel=numel)
    numel = bytes_on_accelerators(total_bytes, groups) // smallest
    return BucketSizes(numel=numel, layer_numel=_ANY)


def least_unit_bytes(config: ZeroConfig, device: torch.device) -> int:
    """Bytes below which layers that follow one another are one unit, see [Note: the least bytes of a unit]."""
    if isinstance(config.unit_bytes, int):
        return config.unit_bytes
    if config.unit_modules != AUTO:
        return 0
    return SMALLEST_UNIT_BYTES["cpu" if device.type == "cpu" else "accelerator"]


def bytes_on_host(total_bytes: int) -> int:
    """About eight buckets a model, none under 1 MiB (calls cost) or over 25 MiB (the last one is never overlapped).

    [Note: buckets on the host]
    Over gloo, buckets of 16 to 32 MB took DDP's CPU time a step, those of 4 MB 5 % more and those of 1 MB 7 % more (a GPT-2
    of 30 M parameters, two ranks on two cores).
    """
    return min(_LARGEST_BYTES, max(_SMALLEST_BYTES, total_bytes // _BUCKETS_A_MODEL))


def bytes_on_accelerators(total_bytes: int, groups: Groups) -> int:
    """What costs least over the group in which whole buckets are reduced, up to 256 MiB and an eighth of all.

    Beyond that `GRAD_BUFFERS` of them would be most of the gradients that stage 2 does not keep.
    """
    group = groups.shard if groups.shard.size > 1 else groups.replicate
    nodes = len({groups.nodes[rank] for rank in group.ranks})
    wanted = cost_of(ranks=group.size, nodes=nodes).bucket_bytes(total_bytes)
    return max(_SMALLEST_BYTES, min(_LARGEST_QUEUED_BYTES, total_bytes // _BUCKETS_A_MODEL, wanted))
