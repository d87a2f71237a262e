"""The gradients of a bucket, from the reduction that writes them until the step that uses them."""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, eq, is_, is_not
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..layout.intervals import Interval
from .bucket import Bucket, LaidGradients, ParameterSlot
from .clipped_gradient import ClippedGradient, Coefficient, coefficient_of_all, taken_gradients
from .sharded_gradient import GradientState, ShardedGradient, ShardedGradientError

# Called for all parameters in each step, so the loops run in C.
GRADIENT_OF = attrgetter("grad")
_STATE, _DTYPE = attrgetter("state"), attrgetter("dtype")
_ROW_TENSORS, _LAID = attrgetter("row_tensors"), attrgetter("laid")
_VIEWS, _ADDRESSES, _FLATS = map(attrgetter, ("views", "addresses", "flats"))


def have_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors have a gradient."""
    return all(map(is_not, map(GRADIENT_OF, tensors), repeat(None)))


def step_on_reduced(bucket: Bucket) -> None:
    """Keeps the reduced gradients in bfloat16 if reduced in bfloat16; the bucket's kernel accepts this dtype.

    Sums with later gradients still use the master dtype. float16 is excluded because unscaled gradients would underflow.
    """
    if bucket.precision.reduced == torch.bfloat16 and not bucket.tier.is_offloaded:
        bucket.gradient_dtype = torch.bfloat16
        for row in bucket.rows:
            # By default, torch refuses a gradient of a dtype different from the parameter's.
            row.tensor.grad_dtype = None


def hold_gradients(bucket: Bucket) -> None:
    """Replaces all `p.grad` by stand-ins, because the gradients are reduced into this rank's parts."""
    with look_only():
        # `setattr` returns None, so `any` runs to the end.
        any(map(setattr, *bucket.held))


def lay_gradients(bucket: Bucket, flat: torch.Tensor) -> None:
    """Makes the gradients of all parts views of `flat`, (shard_numel,)."""
    views = bucket.row_views.of(flat)
    with look_only():
        # As in `set_all`, for speed.
        any(map(setattr, bucket.row_tensors, repeat("grad"), views))
    if views:
        # The parts of most buckets are the whole shard, without padding.
        whole = bucket.only_run
        flats = [(whole, flat)] if whole else [(part, flat[part.start : part.stop]) for _, part in bucket.row_runs]
        bucket.laid = LaidGradients(views, list(map(torch.Tensor.data_ptr, views)), flats)


def flat_gradients(bucket: Bucket) -> list[tuple[Interval, torch.Tensor]] | None:
    """Returns the reduced gradients as the fewest flat views; None if laid out differently or not plain.

    Clipped gradients whose coefficients a kernel multiplies count as plain.
    """
    laid = laid_gradients_of([bucket])
    if laid is not None and laid[1] is None:
        return laid[0][0]
    gradients: Any = list(map(GRADIENT_OF, bucket.row_tensors))
    kinds = set(map(type, gradients))
    if kinds == {ClippedGradient}:
        gradients = taken_gradients(gradients)
    elif kinds != {torch.Tensor}:
        return None
    if gradients is None or len(set(map(_DTYPE, gradients))) != 1:
        return None
    base = gradients[0].data_ptr() - bucket.rows[0].layout.in_shard.start * gradients[0].itemsize
    starts = map(gradients[0].itemsize.__mul__, bucket.row_starts)
    if not all(map(eq, map(torch.Tensor.data_ptr, gradients), map(base.__add__, starts))):
        return None
    if not all(map(torch.Tensor.is_contiguous, gradients)):
        return None
    found = []
    for number, interval in bucket.row_runs:
        first = gradients[number]
        memory, nbytes = first.untyped_storage(), interval.numel * first.itemsize
        # Adjacent addresses do not suffice: two allocations may be adjacent, and torch refuses a view beyond its storage.
        if first.data_ptr() + nbytes > memory.data_ptr() + memory.nbytes():
            return None
        found.append((interval, first.as_strided((interval.numel,), (1,))))
    return found


def are_in_slots(bucket: Bucket, flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors, one per slot, start at the slots' addresses in a flat gradient buffer."""
    addresses = map(flat.data_ptr().__add__, bucket.slot_starts)
    return all(map(eq, map(torch.Tensor.data_ptr, tensors), addresses))


def _are_as_backward_left_them(bucket: Bucket) -> bool:
    """Whether each gradient is unused and as left by a backward. False may be wrong."""
    if not have_gradients(bucket.row_tensors):
        return False
    gradients = map(GRADIENT_OF, bucket.parameters)
    if bucket.rows_are_parameters:
        return {torch.Tensor}.issuperset(map(type, gradients))
    return all(map(is_, gradients, bucket.stand_ins)) and GradientState.SPENT not in map(_STATE, bucket.stand_ins)


def begin_step(bucket: Bucket) -> None:
    """Follows edits and prepares the gradients: None if no rank has a gradient, zeros if zeroed by the script.

    Raises:
        ShardedGradientError: there was no backward since the last step, which freed the gradients; or the script has
            assigned a gradient, which no rank would use in the step.
    """
    # Before any gradient is read, because the copy to the parts may still be running.
    bucket.arrival.wait()
    with look_only():
        if _are_as_backward_left_them(bucket):
            bucket.follow_edits()
            return
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if gradient is slot.sharded_gradient:
                if slot.sharded_gradient.state is GradientState.SPENT:
                    slot.sharded_gradient.refuse_if_spent()
            # Accept any stand-in: `adopt` makes a new one and leaves the old one in `grad`, and `model.to(...)` sets a
            # moved one.
            elif not (bucket.rows_are_parameters or gradient is None or isinstance(gradient, ShardedGradient)):
                raise ShardedGradientError(
                    f"hf_zero: `grad` of {slot.name!r} was set by hand, but the step uses the gradient that backward reduced. "
                    "Let backward compute the gradient, or train at `stage: 0`, where `grad` is the reduced gradient."
                )
        # Before the step, which would otherwise start from the old master and undo the script's edit.
        bucket.follow_edits()
        for row in bucket.rows:
            tensor, parameter = row.tensor, row.slot.parameter
            # Inlines `has_gradient`, because this runs for each parameter in each step.
            if tensor.grad is None or (tensor is not parameter and parameter.grad is None):
                # An optimizer skips rows without a gradient, but steps zeroed ones (weight decay, momentum), as under DDP.
                tensor.grad = torch.zeros_like(tensor) if row.is_zeroed else None


def end_step(bucket: Bucket) -> list[ParameterSlot]:
    """Frees the reduced gradients; `p.grad` stays until zeroed by the script. Returns the stepped slots.

    Increments autograd's version counters of these parameters: a backward through a graph from before the step then
    raises, as under DDP, instead of silently computing with the new values.
    """
    stepped = []
    bucket.laid = None
    with look_only():
        set_all(bucket.row_tensors, "grad", repeat(None))
        for slot in bucket.slots:
            sharded = slot.sharded_gradient
            if slot.parameter.grad is sharded:
                # Inlines `become`, because this runs for each parameter in each step.
                sharded.state, sharded.pending = GradientState.SPENT, None
            elif slot.parameter.grad is not None or sharded.state is GradientState.ZEROED:
                slot.parameter.grad = None
            else:
                continue
            stepped.append(slot)
            # Keep the slot's version in step, because the step is not an edit for the master to follow.
            slot.version += 1
        increment_version([slot.parameter for slot in stepped])
    return stepped


def drop_gradients(bucket: Bucket) -> None:
    """Frees the reduced gradients and clears `p.grad`."""
    # Wait, because a copy still running would write to memory possibly reused by the allocator.
    bucket.arrival.wait()
    bucket.laid = None
    with look_only():
        set_all(bucket.row_tensors, "grad", repeat(None))
        set_all(bucket.parameters, "grad", repeat(None))


def laid_gradients_of(
    buckets: Sequence[Bucket],
) -> tuple[list[list[tuple[Interval, torch.Tensor]]], Coefficient | None] | None:
    """Returns each bucket's gradients as `flat_gradients` does, and the clip coefficient that nobody has multiplied in or taken.

    None unless all gradients are as `lay_gradients` has left them, with one coefficient: this is a quick look.
    """
    laid: list[Any] = list(map(_LAID, buckets))
    if not all(laid):
        return None
    views = list(chain.from_iterable(map(_VIEWS, laid)))
    found = coefficient_of_all(list(map(GRADIENT_OF, chain.from_iterable(map(_ROW_TENSORS, buckets)))), views)
    if found is None or list(map(torch.Tensor.data_ptr, views)) != list(chain.from_iterable(map(_ADDRESSES, laid))):
        return None
    return list(map(_FLATS, laid)), found[0]
