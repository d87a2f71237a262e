"""Steps of state in host memory that end one step late, behind the next forward and backward."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ...buckets.bucket import Bucket, Row
from ...device import Arrival
from ...offload.tier import StateFiles, Tier
from ..state.bucket_state import BucketState
from ..state.placeholders import Placeholders
from ..state.state_kinds import NO_ARGUMENTS, arguments_of
from ..state.step_timing import DUE, DUE_GRADIENT, StepTiming
from .double import Stepped
from .seen_step import Seen
from .steps_beside import StepsBeside, memory_bytes, try_aside

_SETTING = f"{DUE}setting "
_WARMED_UP = f"{DUE}after steps in time"


class Late(StepTiming):
    """`optimizer.step()` starts a step and takes over the one that it started the time before.

    [Note: the delayed update]
    The parameters of step t then have the gradients of all steps before t - 1: training is not exact. A due step has the
    gradients and the settings (the learning rate) of the call that started it, and ends in the next call, on the state that it
    finds there. Until then the state is that of the parameters, for a look and for a save, which takes the gradients that are
    due along. The gradients of a run's last step are not applied.

    Delayed parameter update: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021.

    Args:
        tier, files, placeholders: see `StepsBeside`.
        warmup: of each optimizer, the steps at the start that are taken in their time.
    """

    steps_early = False

    def __init__(
        self,
        tier: Tier,
        files: StateFiles | None,
        placeholders: Placeholders,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        warmup: int,
    ):
        self._beside = StepsBeside(tier, files, placeholders)
        self._warmup = warmup
        self._in_time = dict.fromkeys(optimizers, 0)
        self._due: dict[Bucket, tuple[Seen, Future[Stepped]]] = {}
        self._restored: dict[Bucket, dict[Row, tuple[torch.Tensor, dict[str, Any]]]] = {}

    def admit(self, optimizer: torch.optim.Optimizer, state: BucketState) -> None:
        trial, hindrance = try_aside(optimizer, state)
        if trial is None or hindrance is not None:
            raise ValueError(
                f"hf_zero: `offload.delay: 1` steps a bucket at a time beside training, which cannot be: {hindrance}. Leave "
                "`offload.delay` at 0, or use another optimizer."
            )
        self._beside.add(optimizer, state, memory_bytes(state, trial))

    def takes(self, bucket: Bucket) -> bool:
        return bucket in self._beside.doubles

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        """The step is begun when the script asks for it."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        if arguments_of(optimizer) != NO_ARGUMENTS:
            raise ValueError(
                f"hf_zero: {type(optimizer).__name__}.step was given arguments, and `offload.delay: 1` takes the step behind the "
                "call, or after a checkpoint, which has no place for them. Leave `offload.delay` at 0, or the arguments out."
            )
        mine = self._beside.of(optimizer)
        for bucket in mine:
            self._start_restored(bucket, optimizer)
        due = {bucket: self._due.pop(bucket) for bucket in mine if bucket in self._due}
        stepped = {bucket: future.result() for bucket, (_, future) in due.items()}
        for bucket, (seen, _) in due.items():
            now = self._beside.doubles[bucket].seen_again(seen)
            if not seen.equals(now):
                # The script has changed weights or state meanwhile.
                stepped[bucket] = self._beside.start(bucket, now, Arrival()).result()
        self._beside.give_back_buffers()
        self._beside.take_over(stepped)
        if self._in_time[optimizer] < self._warmup:
            self._in_time[optimizer] += 1
            return ()
        for bucket in mine:
            seen = self._beside.doubles[bucket].seen()
            if seen.rows:
                self._due[bucket] = (seen, self._beside.start(bucket, seen, Arrival()))
        return mine

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        # What was due in this run is not of the state that is put.
        self._due.pop(row.slot.bucket, None)
        restored = self._restored.setdefault(row.slot.bucket, {})
        restored.pop(row, None)
        if _WARMED_UP in state:
            self._in_time[self._beside.doubles[row.slot.bucket].optimizer] = state[_WARMED_UP]
        if DUE_GRADIENT in state:
            settings = {n.removeprefix(_SETTING): value for n, value in state.items() if n.startswith(_SETTING)}
            restored[row] = (state[DUE_GRADIENT], settings)
        return {name: value for name, value in state.items() if not name.startswith(DUE)}

    def beside(self, row: Row) -> dict[str, Any]:
        bucket = row.slot.bucket
        if bucket not in self._beside.doubles:
            return {}
        warmed_up = {_WARMED_UP: self._in_time[self._beside.doubles[bucket].optimizer]}
        if bucket in self._restored and row in self._restored[bucket]:
            # No step has come since the checkpoint was read.
            gradient, settings = self._restored[bucket][row]
            return warmed_up | {DUE_GRADIENT: gradient} | {_SETTING + name: value for name, value in settings.items()}
        if bucket not in self._due:
            return warmed_up
        seen, _ = self._due[bucket]
        for due, gradient, _ in seen.rows:
            if due is row:
                return warmed_up | {DUE_GRADIENT: gradient, **_flat(seen.settings)}
        return warmed_up

    def report(self) -> None:
        return None

    def copy_bytes(self) -> int:
        return self._beside.copy_bytes()

    def file_copy_bytes(self) -> int:
        return self._beside.file_copy_bytes()

    def gradient_bytes(self) -> int:
        return self._beside.scratch_bytes + sum(bucket.gradient_bytes for bucket in self._due)

    def most_beside_bytes(self) -> int:
        return self._beside.most_bytes + sum(bucket.gradient_bytes for bucket in self._beside.doubles)

    def close(self) -> None:
        self._due.clear()
        self._beside.close()

    def _start_restored(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
        """Starts what was due when the checkpoint was made that has been loaded."""
        restored = self._restored.pop(bucket, None)
        if not restored:
            return
        self._in_time[optimizer] = self._warmup
        held = {row: row.tensor.grad for row in bucket.rows}
        for row in bucket.rows:
            row.tensor.grad = restored[row][0] if row in restored else None
        seen = self._beside.doubles[bucket].seen()
        for row, gradient in held.items():
            row.tensor.grad = gradient
        saved = next(iter(restored.values()))[1]
        seen = seen.with_settings({name: _as_saved(name, value, saved) for name, value in seen.settings.items()})
        self._due[bucket] = (seen, self._beside.start(bucket, seen, Arrival()))


def _flat(settings: dict[str, Any]) -> dict[str, float]:
    """The numbers in an optimizer group's settings by name, for a checkpoint; those of a tuple as `betas 0`, `betas 1`."""
    found: dict[str, float] = {}
    for name, value in settings.items():
        parts = (
            {f"{name} {i}": part for i, part in enumerate(value)} if isinstance(value, tuple | list) else {name: value}
        )
        for part, number in parts.items():
            # A learning rate may be a tensor, which a scheduler writes into.
            plain = number.item() if torch.is_tensor(number) and number.numel() == 1 else number
            if isinstance(plain, int | float) and not isinstance(plain, bool):
                found[_SETTING + part] = plain
    return found


def _as_saved(name: str, value: Any, saved: dict[str, float]) -> Any:
    """A setting as it was saved by `_flat`; one that was not is as it is now."""
    if isinstance(value, tuple | list):
        parts = [_as_saved(f"{name} {i}", part, saved) for i, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if torch.is_tensor(value) and name in saved:
        return torch.full_like(value, saved[name])
    return saved.get(name, value)
