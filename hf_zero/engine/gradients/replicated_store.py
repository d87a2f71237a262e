"""Unsharded gradients, reduced by all-reduce as under DDP."""

from collections.abc import Collection

import torch

from ...buckets.bucket import Bucket, ParameterSlot, Row
from ...comm.transport import Handle
from ...device import Arrival
from ...offload.downlink import Downlink
from ...offload.tier import Tier
from ..travel.reductions import Reduction
from .buffer_pool import OpenBuffer
from .store import GradientStore, Landing, add_or_set, new_buffer


class ReplicatedGradients(GradientStore):
    """Every rank keeps and reduces whole gradients by all-reduce; `p.grad` is a view of the bucket, as under DDP.

    A view that is still there in the next backward has been accumulated into by autograd, so it is divided and reduced
    again: sum of (average / W) is the average.

    From the step on only these views keep the memory, so that it goes when the script zeroes gradients, and the next forward's
    activations do not come on top of it.
    """

    def __init__(self, reduction: Reduction, landing: Landing):
        super().__init__(reduction, landing)
        self._lasting: dict[Bucket, OpenBuffer] = {}
        # Of the parameters' dtype, where gradients travel in another.
        self._reduced: dict[Bucket, torch.Tensor] = {}
        self._under_way: dict[Bucket, torch.Tensor] = {}
        self._held_bytes: dict[Bucket, int] = {}

    def held_bytes(self) -> dict[str, int]:
        return {"gradients": sum(self._held_bytes.values()), "gradient buffers": 0}

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if gradient.dtype != slot.bucket.precision.reduce:
            # Autograd itself keeps adding to `p.grad`, which may have no other dtype than the parameter.
            return
        lasting = self._lasting_buffer(slot.bucket)
        view = lasting.views[slot.number]
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            slot.parameter.grad = slot.view_of(lasting.flat)

    def release(self, bucket: Bucket) -> None:
        """`p.grad` lasts until the script zeroes it."""
        self._lasting.pop(bucket, None)
        self._reduced.pop(bucket, None)

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put(slot, gradient)
        slot.parameter.grad = None

    def put_small(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put_small(slot, gradient)
        slot.parameter.grad = None

    def start(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.arrived and slot.parameter.grad is not None:
                slot.used = True
                self.put(slot, slot.parameter.grad)
        super().start(bucket)

    def _lasting_buffer(self, bucket: Bucket) -> OpenBuffer:
        if bucket not in self._lasting:
            self._lasting[bucket] = new_buffer(bucket)
            self._count(bucket)
        return self._lasting[bucket]

    def _open_buffer(self, bucket: Bucket) -> OpenBuffer:
        # What comes late finds the bucket's own buffer on its way, or with `p.grad` in it.
        is_late = bucket in self._started or bucket in self._again
        return new_buffer(bucket) if is_late else self._lasting_buffer(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        self._under_way[bucket] = flat
        return self._reduction.start(bucket, flat, flat)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        flat, precision = self._under_way.pop(bucket), bucket.precision
        if precision.reduce == precision.master:
            return add_or_set(bucket, flat, flat, Downlink(), going_on)
        if bucket not in self._reduced:
            self._reduced[bucket] = Tier(bucket.device).scratch(bucket.layout.numel, precision.master)
            self._count(bucket)
        return add_or_set(bucket, flat, self._reduced[bucket], Downlink(), going_on)

    def _count(self, bucket: Bucket) -> None:
        flat, reduced = self._lasting[bucket].flat, self._reduced.get(bucket)
        self._held_bytes[bucket] = flat.nbytes + (0 if reduced is None else reduced.nbytes)
