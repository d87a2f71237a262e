"""Steps of state in host memory that end one step late, behind the next forward and backward."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ...device import Arrival
from ...offload.tier import Tier
from ..buckets.bucket import Bucket, Row
from ..state.holder import DUE
from .copies_holder import SteppedOnCopies
from .step_copies import Seen, Stepped, look, look_again

_GRADIENT = f"{DUE}gradient"
_SETTING = f"{DUE}setting "


class Delayed(SteppedOnCopies):
    """`optimizer.step()` starts a step and takes over the one that it started the time before.

    [Note: the delayed update]
    The parameters of step t then have the gradients of all steps before t - 1: training is not exact. A due step has the
    gradients and the settings (the learning rate) of the call that started it, and ends in the next call, on the state that it
    finds there. Until then the state is that of the parameters, for a look and for a save, which takes the gradients that are
    due along. The gradients of a run's last step are not applied.

    Delayed parameter update: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021.

    Args:
        warmup: of each optimizer, the steps at the start that are taken in their time.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], tier: Tier, *, warmup: int):
        super().__init__(optimizers, tier)
        self._in_time = {optimizer: warmup for optimizer in optimizers}
        self._due: dict[Bucket, tuple[Seen, Future[Stepped]]] = {}
        self._restored: dict[Bucket, dict[Row, tuple[torch.Tensor, dict[str, Any]]]] = {}

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().step_with(optimizer, buckets)
        if self.hindrance is not None:
            raise ValueError(
                f"hf_zero: `offload.delay: 1` steps a bucket at a time beside training, which cannot be: {self.hindrance}. "
                "Leave `offload.delay` at 0, or use another optimizer."
            )

    def beside(self, row: Row) -> dict[str, Any]:
        if row.slot.bucket not in self._due:
            return {}
        seen, _ = self._due[row.slot.bucket]
        for due, gradient, _ in seen.rows:
            if due is row:
                return {_GRADIENT: gradient, **_flat(seen.settings)}
        return {}

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        # What was due in this run is not of the state that is put.
        self._due.pop(row.slot.bucket, None)
        restored = self._restored.setdefault(row.slot.bucket, {})
        restored.pop(row, None)
        due = {name: value for name, value in state.items() if name.startswith(DUE)}
        if due:
            settings = {name.removeprefix(_SETTING): value for name, value in due.items() if name != _GRADIENT}
            restored[row] = (due[_GRADIENT], settings)
        return {name: value for name, value in state.items() if name not in due}

    def gradient_bytes(self) -> int:
        return super().gradient_bytes() + sum(bucket.gradient_bytes for bucket in self._due)

    def most_beside_bytes(self) -> int:
        return super().most_beside_bytes() + sum(bucket.gradient_bytes for bucket in self.shadows)

    def close(self, buckets: Sequence[Bucket]) -> None:
        self._due.clear()
        super().close(buckets)

    def _admits(self, copy_bytes: int) -> bool:
        return True

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        mine = [bucket for bucket in self.shadows if self._optimizer_of(bucket) is optimizer]
        for bucket in mine:
            self._start_restored(bucket, optimizer)
        due = {bucket: self._due.pop(bucket) for bucket in mine if bucket in self._due}
        stepped = {bucket: future.result() for bucket, (_, future) in due.items()}
        for bucket, (seen, _) in due.items():
            now = look_again(bucket, optimizer, seen)
            if not seen.equals(now):
                # The script has changed weights or state meanwhile.
                stepped[bucket] = self._start_step(bucket, now, Arrival()).result()
            self.shadows[bucket].take_over(stepped[bucket])
        if self._in_time[optimizer]:
            self._in_time[optimizer] -= 1
            return
        for bucket in mine:
            seen = look(bucket, optimizer)
            if seen.rows:
                self._due[bucket] = (seen, self._start_step(bucket, seen, Arrival()))
            for row in bucket.rows:
                row.tensor.grad = None

    def _start_restored(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
        """Starts what was due when the checkpoint was made that has been loaded."""
        restored = self._restored.pop(bucket, None)
        if not restored:
            return
        self._in_time[optimizer] = 0
        held = {row: row.tensor.grad for row in bucket.rows}
        for row in bucket.rows:
            row.tensor.grad = restored[row][0] if row in restored else None
        seen = look(bucket, optimizer)
        for row, gradient in held.items():
            row.tensor.grad = gradient
        saved = next(iter(restored.values()))[1]
        seen = seen.with_settings({name: _settled(name, value, saved) for name, value in seen.settings.items()})
        self._due[bucket] = (seen, self._start_step(bucket, seen, Arrival()))


def _flat(settings: dict[str, Any]) -> dict[str, float]:
    """The numbers in an optimizer group's settings by name, for a checkpoint; those of a tuple as `betas 0`, `betas 1`."""
    found: dict[str, float] = {}
    for name, value in settings.items():
        parts = {f"{name} {i}": part for i, part in enumerate(value)} if isinstance(value, tuple) else {name: value}
        for part, number in parts.items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                found[_SETTING + part] = number
    return found


def _settled(name: str, value: Any, saved: dict[str, float]) -> Any:
    """A setting as it was saved by `_flat`; one that was not is as it is now."""
    if isinstance(value, tuple):
        return tuple(saved.get(f"{name} {i}", part) for i, part in enumerate(value))
    return saved.get(name, value)
