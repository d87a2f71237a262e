"""The next step of one bucket, taken on copies, to be taken over or forgotten."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from ..buckets.bucket import Bucket, Row
from ..state.state_kinds import Trial, double_of, own_step, settings_of
from ..state.state_rows import elementwise_state


@dataclass(frozen=True, eq=False)
class Seen:
    """What a bucket's step depends on, as it was at one moment.

    Attributes:
        rows: those with a gradient, in their group's order, each with its gradient and its state.
        settings: of the group.
        marks: (object, version) of every tensor and dict that the step reads. The objects are kept, so that none of their
            addresses is given to another.
    """

    rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...]
    settings: dict[str, Any]
    marks: tuple[tuple[Any, Any], ...]

    def equals(self, other: "Seen") -> bool:
        """Whether a step would read the same: the same objects, none of them written to since, and equal settings."""
        return (
            len(self.marks) == len(other.marks)
            and all(a is b and old == new for (a, old), (b, new) in zip(self.marks, other.marks))
            and _are_equal(self.settings, other.settings)
        )

    def with_marks(self, *marks: tuple[Any, Any]) -> "Seen":
        """The same, and more that the step depends on."""
        return replace(self, marks=self.marks + marks)

    def with_settings(self, settings: dict[str, Any]) -> "Seen":
        """The same with other settings of the group."""
        return replace(self, settings=settings)


def look(bucket: Bucket, optimizer: torch.optim.Optimizer) -> Seen:
    """What a step of the bucket would depend on now. Reads no tensor's values, but those of tensors in the settings."""
    group = optimizer.param_groups[bucket.key.group]
    has = {id(row.tensor): (row, gradient) for row in bucket.rows if (gradient := row.tensor.grad) is not None}
    rows = [has[id(tensor)] for tensor in group["params"] if id(tensor) in has]
    # By `get`: the register makes an entry for whoever asks, and an empty one would look like a step taken.
    found = tuple((row, gradient, optimizer.state.get(row.tensor, {})) for row, gradient in rows)
    return Seen(found, settings_of(group), _marks(bucket, optimizer, found))


def look_again(bucket: Bucket, optimizer: torch.optim.Optimizer, seen: Seen) -> Seen:
    """What a step with the gradients and settings of `seen` would depend on now."""
    found = tuple((row, gradient, optimizer.state.get(row.tensor, {})) for row, gradient, _ in seen.rows)
    return Seen(found, seen.settings, _marks(bucket, optimizer, found))


def _marks(
    bucket: Bucket,
    optimizer: torch.optim.Optimizer,
    rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...],
) -> tuple[tuple[Any, Any], ...]:
    # A gradient scaler hands these to a fused step at the last moment.
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


class Shadow:
    """Copies of a bucket's master and state, on which its next step is taken while training still reads the old ones.

    [Note: two copies of the state]
    An optimizer's step writes in place. Taken early, on copies, it changes nothing that anyone can see: a look at the state, a
    save, a gradient that is clipped after all find what they would find without it. If the step that then comes would read
    what was read early (`Seen.equals`), the copies become the state and the old tensors become the next copies. Else the copies
    are forgotten, and the step is taken as ever. Both ways, the bits are those of a step taken in its time.

    Edits that torch does not count (through `.data` or numpy, of rows or their gradients) are not noticed.
    """

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer):
        self._bucket = bucket
        self._optimizer = optimizer
        self._spare_master: torch.Tensor | None = None
        self._spare_state: dict[tuple[Row, str], torch.Tensor] = {}

    def nbytes(self) -> int:
        """Bytes of the copies, while they wait for the next step."""
        master = 0 if self._spare_master is None else self._spare_master.nbytes
        return master + sum(tensor.nbytes for tensor in self._spare_state.values())

    @torch.no_grad()
    def step(self, seen: Seen, scratch: torch.Tensor) -> "Stepped":
        """Takes the step that `seen` describes on copies. Runs in a thread of its own; calls follow each other.

        Args:
            scratch: (at least shard_numel,) of the master dtype: some optimizers write into their gradients.
        """
        if self._spare_master is None:
            self._spare_master = self._bucket.tier.empty(self._bucket.layout.shard_numel, self._bucket.precision.master)
        # By `data`, which has a version of its own: rows once made as views of this memory count its edits as their own.
        master = self._spare_master.data.copy_(self._bucket.master)
        states = {}
        for row, _, state in seen.rows:
            elementwise = elementwise_state(state, row)
            states[row] = {
                name: self._copy_of(row, name, value) if name in elementwise else copied(value)
                for name, value in state.items()
            }
        return Stepped(master, step_doubles(self._optimizer, seen, master, states, scratch))

    def take_over(self, stepped: "Stepped") -> None:
        """Makes the copies the state, and the state the next copies."""
        self._spare_master = self._bucket.master
        self._bucket.exchange_master(cast(torch.Tensor, stepped.master))
        for row, state in stepped.states.items():
            register = self._optimizer.state[row.tensor]
            self._spare_state.update({(row, name): old for name, old in elementwise_state(register, row).items()})
            register.clear()
            register.update(state)

    def _copy_of(self, row: Row, name: str, value: torch.Tensor) -> torch.Tensor:
        spare = self._spare_state.get((row, name))
        if spare is None or spare.shape != value.shape or spare.dtype != value.dtype:
            spare = self._spare_state[row, name] = torch.empty_like(value)
        return spare.copy_(value)


@dataclass(frozen=True, eq=False)
class Stepped:
    """A bucket as a step leaves it: the master, (shard_numel,), None where it is in a file, and each row's state."""

    master: torch.Tensor | None
    states: dict[Row, dict[str, Any]]


def step_doubles(
    optimizer: torch.optim.Optimizer,
    seen: Seen,
    master: torch.Tensor,
    states: Mapping[Row, dict[str, Any]],
    scratch: torch.Tensor,
) -> dict[Row, dict[str, Any]]:
    """Takes the step that `seen` describes on `master`, (shard_numel,), and on `states`, both the caller's; returns the rows'
    state after it.

    Args:
        scratch: (shard_numel,) of the master dtype, for the gradients.
    """
    doubles: dict[Row, nn.Parameter] = {}
    for row, gradient, _ in seen.rows:
        double = doubles[row] = nn.Parameter(row.of(master))
        double.grad = row.of(scratch).copy_(gradient)
    group = settings_of(seen.settings) | {"params": list(doubles.values())}
    # An empty entry would look like a step taken.
    register: dict[torch.Tensor, dict[str, Any]] = {doubles[row]: state for row, state in states.items() if state}
    twin = double_of(optimizer, group, register)
    own_step(twin)
    return {row: dict(twin.state[double]) for row, double in doubles.items()}


def copied(value: Any) -> Any:
    """State that a step may write to, apart from the register's."""
    return value.clone() if torch.is_tensor(value) else value


def hindrance_of(optimizer: torch.optim.Optimizer, bucket: Bucket, trial: Trial | None) -> str | None:
    """Why the bucket cannot be stepped by itself and not in its time; None if it can."""
    if bucket.layout.intact:
        # It may look at more than one of them, too: LAMB in some forms takes a norm over all.
        return f"{type(optimizer).__name__} looks at whole parameters"
    return trial.hindrance if trial else f"{type(optimizer).__name__} cannot be tried beforehand"
