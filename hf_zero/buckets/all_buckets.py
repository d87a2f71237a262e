"""The functions of a bucket for all buckets of a step at once, with loops in C over all slots or rows."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, compress, filterfalse, repeat
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..queues import ARRIVED
from .bucket import (
    BUCKET_OF,
    FOLLOWED_VERSION,
    PARAMETER_OF,
    ROWS_OF,
    TENSOR_OF,
    Bucket,
    ParameterSlot,
    Row,
)
from .gradients import GRADIENT_OF, begin_step, end_step, have_gradients
from .memory import UnshardedMemory
from .sharded_gradient import GradientState, allow_norms, refuse_norms

_STATE, _VERSION, _SLOT_VERSION = attrgetter("state"), attrgetter("_version"), attrgetter("version")
_MEMORY, _ARRIVAL, _IS_AWAY = attrgetter("memory"), attrgetter("arrival.pending"), attrgetter("is_away")
_ROW_TENSORS, _PARAMETERS, _ROW_PARAMETERS = map(attrgetter, ("row_tensors", "parameters", "row_parameters"))
_STAND_INS, _SLOTS, ROWS_ARE_PARAMETERS = map(attrgetter, ("stand_ins", "slots", "rows_are_parameters"))


def rows_with_gradient(rows: Iterable[Row]) -> list[Row]:
    """Returns the shards with a gradient for the next step, after waiting for these gradients."""
    rows = list(rows)
    with look_only():
        if not (have_gradients(map(TENSOR_OF, rows)) and have_gradients(map(PARAMETER_OF, rows))):
            owned = [(row, row.tensor, row.slot.parameter) for row in rows]
            # Inlines `has_gradient`, because this runs for each parameter in each step.
            rows = [row for row, tensor, p in owned if tensor.grad is not None and (tensor is p or p.grad is not None)]
    # The order does not matter: each wait is for this rank's own copies and involves no other rank.
    await_gradients(set(map(BUCKET_OF, rows)))
    return rows


def refuse_norms_of(buckets: Iterable[Bucket]) -> None:
    """Makes the norm of a row's gradient raise if the row is only a part of its parameter."""
    gradients = list(map(GRADIENT_OF, _all(_with_parts(buckets), _ROW_TENSORS)))
    # Plain tensors only, because the guard replaces the class: a clipped gradient would lose its pending multiplication.
    is_plain = {torch.Tensor}.issuperset(map(type, gradients))
    refuse_norms(gradients if is_plain else [each for each in gradients if type(each) is torch.Tensor])


def allow_norms_of(buckets: Iterable[Bucket]) -> None:
    """Allows the norms again, for a caller aware of partial rows."""
    allow_norms(list(map(GRADIENT_OF, _all(_with_parts(buckets), _ROW_TENSORS))))


def _all(buckets: Iterable[Bucket], kind: Callable[[Bucket], Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(map(kind, buckets)))


def _with_parts(buckets: Iterable[Bucket]) -> list[Bucket]:
    return list(filterfalse(ROWS_ARE_PARAMETERS, buckets))


def await_gradients(buckets: Collection[Bucket]) -> None:
    """Waits for the reduced gradients of all buckets."""
    if not all(map(is_, map(_ARRIVAL, buckets), repeat(ARRIVED))):
        for bucket in buckets:
            bucket.arrival.wait()


def begin_step_of(buckets: Sequence[Bucket]) -> None:
    """Calls `begin_step` of all buckets unless a fast check shows there is nothing to do."""
    await_gradients(buckets)
    if not (any(map(ROWS_ARE_PARAMETERS, buckets)) or any(map(_IS_AWAY, buckets))):
        with look_only():
            stand_ins = _all(buckets, _STAND_INS)
            versions = map(_VERSION, _all(buckets, _ROW_PARAMETERS))
            if (
                have_gradients(_all(buckets, _ROW_TENSORS))
                and all(map(is_, map(GRADIENT_OF, _all(buckets, _PARAMETERS)), stand_ins))
                and GradientState.SPENT not in map(_STATE, stand_ins)
                and all(map(eq, versions, map(FOLLOWED_VERSION, _all(buckets, ROWS_OF))))
            ):
                return
    for bucket in buckets:
        begin_step(bucket)


def end_step_of(buckets: Iterable[Bucket]) -> dict[Bucket, list[ParameterSlot]]:
    """Calls `end_step` of the buckets whose rows are parts of parameters; returns the stepped slots.

    Rows that are whole parameters keep `grad` until the script zeroes it, as under DDP; no other reference to its memory
    remains.
    """
    set_all(buckets, "laid", repeat(None))
    buckets = _with_parts(buckets)
    with look_only():
        parameters, stand_ins = _all(buckets, _PARAMETERS), _all(buckets, _STAND_INS)
        if not all(map(is_, map(GRADIENT_OF, parameters), stand_ins)):
            return {bucket: end_step(bucket) for bucket in buckets}
        # Inlines `end_step`.
        set_all(_all(buckets, _ROW_TENSORS), "grad", repeat(None))
        set_all(stand_ins, "state", repeat(GradientState.SPENT))
        set_all(stand_ins, "pending", repeat(None))
        slots = _all(buckets, _SLOTS)
        set_all(slots, "version", list(map((1).__add__, map(_SLOT_VERSION, slots))))
        increment_version(parameters)
    return dict(zip(buckets, map(_SLOTS, buckets)))


def unsharded(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Returns the buckets whose parameters are whole."""
    buckets = list(buckets)
    return list(compress(buckets, map(isinstance, map(_MEMORY, buckets), repeat(UnshardedMemory))))
