"""State in host memory whose next step is taken while backward goes on."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..device import Arrival, allocate
from .buckets import Bucket
from .holder import InMemory
from .hooks import WeakHook
from .reports import EarlyReport
from .shadow import Seen, Shadow, Stepped, look
from .state_kinds import Trial, try_step
from .trust import Trust

_HOST = torch.device("cpu")


class SteppedEarly(InMemory):
    """Steps a bucket as soon as its gradient has landed, on copies that `optimizer.step()` takes over or forgets.

    See [Note: two copies of the state]. Hooks, clipping and the script come between, as ever; the hook that takes copies over
    runs as the last before the step, and what it has taken over has no gradient any more when the step runs over the rest.

    Args:
        most_bytes: that the copies may take. Buckets beyond it, in the order in which gradients arrive, wait for the step.

    Attributes:
        trust: whether steps are taken early at present.
    """

    steps_early = True

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], most_bytes: int):
        self._optimizers = optimizers
        self._left_bytes = most_bytes
        self._shadows: dict[Bucket, Shadow] = {}
        self._begun: dict[Bucket, tuple[Seen, Future[Stepped] | None]] = {}
        self._hindrance: str | None = None
        self._bucket_count = self._kept = self._forgotten = 0
        self._is_in_vain = False
        self._scratch: torch.Tensor | None = None
        self._hooks: dict[torch.optim.Optimizer, torch.utils.hooks.RemovableHandle] = {}
        # One thread: steps of a bucket follow each other, also those that are forgotten.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_zero-step")
        self.trust = Trust()

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        self._bucket_count += len(buckets)
        for bucket in buckets:
            if not bucket.tier.is_apart:
                continue
            trial = try_step(optimizer, optimizer.param_groups[bucket.layout.key[3]], bucket.precision.master)
            hindrance = _hindrance(optimizer, bucket, trial)
            if hindrance is not None:
                self._hindrance = hindrance
                continue
            element_bytes = sum(dtype.itemsize for _, dtype in trial.kinds) + bucket.precision.master.itemsize
            self._left_bytes -= bucket.layout.shard_numel * element_bytes
            if self._left_bytes >= 0:
                self._shadows[bucket] = Shadow(bucket, optimizer)
        self._hooks[optimizer] = self._register(optimizer)

    def before_forward(self) -> None:
        for optimizer, hook in self._hooks.items():
            hook.remove()
            self._hooks[optimizer] = self._register(optimizer)

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        if bucket in self._begun:
            # Another backward adds to it, or has come in place of a step.
            del self._begun[bucket]
            self._is_in_vain = True
        # A parameter that this rank did not use keeps its gradient, or gets none, when all ranks have been heard.
        if bucket not in self._shadows or not all(row.slot.used for row in bucket.rows):
            return
        seen = look(bucket, self._optimizer_of(bucket))
        future = self._thread.submit(self._step, bucket, seen, arrival) if self.trust.holds else None
        self._begun[bucket] = (seen, future)

    def early_report(self) -> EarlyReport:
        return EarlyReport(
            buckets=len(self._shadows),
            all_buckets=self._bucket_count,
            copy_bytes=sum(shadow.nbytes() for shadow in self._shadows.values()),
            kept=self._kept,
            forgotten=self._forgotten,
            hindrance=self._hindrance,
        )

    def close(self, buckets: Sequence[Bucket]) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._begun.clear()
        self._thread.shutdown()

    def _optimizer_of(self, bucket: Bucket) -> torch.optim.Optimizer:
        return self._optimizers[bucket.layout.key[2]]

    def _register(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        return optimizer.register_step_pre_hook(WeakHook(self, SteppedEarly._on_step))

    def _on_step(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        mine = [bucket for bucket in self._begun if self._optimizer_of(bucket) is optimizer]
        begun = {bucket: self._begun.pop(bucket) for bucket in mine}
        # All of them, and first: a step that failed in its thread ends this one before anything has changed.
        stepped = {bucket: future.result() for bucket, (_, future) in begun.items() if future is not None}
        current = {bucket for bucket, (seen, _) in begun.items() if seen.equals(look(bucket, optimizer))}
        for bucket in current & stepped.keys():
            self._shadows[bucket].take_over(stepped[bucket])
            for row in bucket.rows:
                row.tensor.grad = None
        self._kept += len(current & stepped.keys())
        self._forgotten += len(stepped.keys() - current)
        if mine or self._is_in_vain:
            self.trust.record(in_vain=self._is_in_vain or len(current) < len(mine))
        self._is_in_vain = False

    def _step(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Stepped:
        arrival.wait()
        shadow = self._shadows[bucket]
        if self._scratch is None:
            nbytes = max(shadow.scratch_bytes for shadow in self._shadows.values())
            self._scratch = allocate(nbytes, torch.uint8, _HOST)
        return shadow.step(seen, self._scratch[: shadow.scratch_bytes].view(bucket.precision.master))


def _hindrance(optimizer: torch.optim.Optimizer, bucket: Bucket, trial: Trial | None) -> str | None:
    """Why the bucket cannot be stepped by itself and before its time; None if it can."""
    if bucket.layout.intact:
        # It may look at more than one of them, too: LAMB in some forms takes a norm over all.
        return f"{type(optimizer).__name__} looks at whole parameters"
    return trial.hindrance if trial else f"{type(optimizer).__name__} cannot be tried beforehand"
