"""Unsharded gradients, reduced by all-reduce as under DDP."""

from collections.abc import Collection, Sequence
from itertools import repeat

import torch

from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..comm.transport import Handle
from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..offload.copies import DeviceToHost
from ..offload.tiers import Tier
from ..queues import Arrival
from .gradient_store import GradientStore, GradientTarget, add_or_set, new_buffer
from .reductions import Reduction


class ReplicatedGradients(GradientStore):
    """Every rank keeps and reduces whole gradients by all-reduce; `p.grad` is a view of the bucket, as under DDP.

    If a view is still `p.grad` in the next backward, autograd has added to the average from before. The sum is divided and
    reduced again, which is correct: the average, divided by W and summed over W ranks, is the same average.

    From the step on, only these views keep the memory alive. So the memory is freed when the script zeroes gradients, before
    the next forward needs memory for activations.
    """

    def __init__(self, reduction: Reduction, landing: GradientTarget):
        super().__init__(reduction, landing)
        self._lasting: dict[Bucket, torch.Tensor] = {}
        # Reduced gradients in the master dtype, if the reduce dtype is different.
        self._reduced: dict[Bucket, torch.Tensor] = {}
        self._under_way: dict[Bucket, torch.Tensor] = {}
        self._held_bytes: dict[Bucket, int] = {}

    def held_bytes(self) -> dict[str, int]:
        return {"gradients": sum(self._held_bytes.values()), "gradient buffers": 0}

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if gradient.dtype != slot.bucket.precision.reduce:
            # `p.grad` must have the parameter's dtype, so it cannot be a view of the buffer. Autograd adds to it.
            return
        view = slot.view_of(self._lasting_buffer(slot.bucket))
        if gradient.data_ptr() != view.data_ptr():
            # So autograd adds the next micro-batches directly into the bucket's buffer, which needs no copy before its reduction.
            slot.parameter.grad = view.copy_(gradient)

    def release(self, bucket: Bucket) -> None:
        """Drops the store's references. `p.grad` keeps the memory until the script zeroes gradients."""
        self._lasting.pop(bucket, None)
        self._reduced.pop(bucket, None)

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put(slot, gradient)
        # Otherwise autograd would add a further gradient of this pass to `grad`, and the first gradient would count twice.
        slot.parameter.grad = None

    def put_whole(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> bool:
        is_taken = super().put_whole(bucket, gradients)
        if is_taken:
            with look_only():
                # As in `put`.
                set_all(bucket.parameters, "grad", repeat(None))
        return is_taken

    def _accumulates(self, bucket: Bucket) -> bool:
        return bucket in self._lasting

    def _buffer_for_whole(self, bucket: Bucket) -> torch.Tensor:
        flat = Tier(bucket.device).scratch(bucket.layout.numel, bucket.precision.reduce)
        self._keep(bucket, flat)
        return flat

    def _put_remaining(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.arrived and slot.parameter.grad is not None:
                slot.used = True
                self.put(slot, slot.parameter.grad)

    def _lasting_buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._lasting:
            self._keep(bucket, new_buffer(bucket))
        return self._lasting[bucket]

    def _keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._lasting[bucket] = flat
        self._count(bucket)

    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        # For late gradients, the bucket's own buffer is in use: it is being reduced, or contains `p.grad`.
        is_late = bucket in self._started or bucket in self._again
        return new_buffer(bucket) if is_late else self._lasting_buffer(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        self._under_way[bucket] = flat
        return self._reduction.start(bucket, flat, flat)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        flat, precision = self._under_way.pop(bucket), bucket.precision
        if precision.reduce == precision.master:
            return add_or_set(bucket, flat, flat, DeviceToHost(), going_on)
        if bucket not in self._reduced:
            self._reduced[bucket] = Tier(bucket.device).scratch(bucket.layout.numel, precision.master)
            self._count(bucket)
        return add_or_set(bucket, flat, self._reduced[bucket], DeviceToHost(), going_on)

    def _count(self, bucket: Bucket) -> None:
        flat, reduced = self._lasting[bucket], self._reduced.get(bucket)
        self._held_bytes[bucket] = flat.nbytes + (0 if reduced is None else reduced.nbytes)
