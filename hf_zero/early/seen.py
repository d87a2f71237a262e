"""The inputs of a bucket's step, and the step itself on tensors of the caller."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..buckets.bucket import Bucket, Row
from ..optimizer.bucket_state import (
    Arguments,
    arguments_of,
    double_of,
    group_with,
    note_arguments,
    own_step,
    settings_of,
)


@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of a bucket's step at one moment.

    Attributes:
        rows: rows with a gradient, in the order of their group, each with its gradient and its state.
        settings: settings of the group.
        arguments: arguments that the script passes to the step.
        marks: (object, version) of every tensor and dict that the step reads. The objects are kept alive, so that no new object
            gets the address of one of them.
    """

    rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...]
    settings: dict[str, Any]
    arguments: Arguments
    marks: tuple[tuple[Any, Any], ...]

    def equals(self, other: "Seen") -> bool:
        """Whether a step would read the same inputs: the same objects, not modified since, and equal settings."""
        return (
            len(self.marks) == len(other.marks)
            and all(a is b and old == new for (a, old), (b, new) in zip(self.marks, other.marks))
            and _are_equal(self.settings, other.settings)
            and _are_equal(self.arguments, other.arguments)
        )

    def with_marks(self, *marks: tuple[Any, Any]) -> "Seen":
        """Adds further inputs of the step."""
        return replace(self, marks=self.marks + marks)


def seen_now(bucket: Bucket, optimizer: torch.optim.Optimizer) -> Seen:
    """Collects the current inputs of the bucket's step. Reads values only of tensors in the settings."""
    group = optimizer.param_groups[bucket.key.group]
    has = {id(row.tensor): (row, gradient) for row in bucket.rows if (gradient := row.tensor.grad) is not None}
    group = group_with(group, lambda tensor: id(tensor) in has)
    rows = [has[id(tensor)] for tensor in group["params"]]
    # Use `get`, because indexing `optimizer.state` creates an empty entry, which would look like a step.
    found = tuple((row, gradient, optimizer.state.get(row.tensor, {})) for row, gradient in rows)
    return Seen(found, settings_of(group), arguments_of(optimizer), _marks(bucket, optimizer, found))


def _marks(
    bucket: Bucket,
    optimizer: torch.optim.Optimizer,
    rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...],
) -> tuple[tuple[Any, Any], ...]:
    # A gradient scaler sets these attributes just before a fused step.
    of_scaler = ((getattr(optimizer, name, None), name) for name in ("grad_scale", "found_inf"))
    return ((bucket.master, bucket.master._version), *of_scaler, *_marks_of(rows))


def _marks_of(rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...]) -> Iterator[tuple[Any, Any]]:
    for row, gradient, state in rows:
        yield row.tensor, row.tensor._version
        yield gradient, gradient._version
        for name, value in state.items():
            yield name, None
            yield (value, value._version) if torch.is_tensor(value) else (None, value)


def _are_equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) or torch.is_tensor(other):
        return torch.is_tensor(one) and torch.is_tensor(other) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return type(one) is type(other) and one == other


def step_on(
    optimizer: torch.optim.Optimizer,
    seen: Seen,
    master: torch.Tensor,
    states: Mapping[Row, dict[str, Any]],
    scratch: torch.Tensor,
) -> dict[Row, dict[str, Any]]:
    """Computes the step described by `seen` on the caller's `master` and `states`; returns the state of the rows afterwards.

    Args:
        master: (shard_numel,), modified in place.
        scratch: (shard_numel,) of the master dtype, for the gradients.
    """
    doubles: dict[Row, nn.Parameter] = {}
    for row, gradient, _ in seen.rows:
        double = doubles[row] = nn.Parameter(row.of(master))
        double.grad = row.of(scratch).copy_(gradient)
        # A step may read attributes of parameters.
        double.__dict__ = row.tensor.__dict__
    group = settings_of(seen.settings) | {"params": list(doubles.values())}
    # Leave empty entries out, because an empty entry would look like a step.
    register: dict[torch.Tensor, dict[str, Any]] = {doubles[row]: state for row, state in states.items() if state}
    twin = double_of(optimizer, group, register)
    note_arguments(twin, seen.arguments)
    own_step(twin)
    return {row: dict(twin.state[double]) for row, double in doubles.items()}
