"""State in host memory that is stepped on copies, in a thread beside training."""

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from ...device import Arrival
from ...offload.tier import Tier
from ..buckets.bucket import Bucket
from ..hooks import WeakHook
from ..state.holder import InMemory
from ..state.state_kinds import try_step
from .step_copies import Seen, Shadow, Stepped, hindrance_of
from .step_thread import StepThread


class SteppedOnCopies(InMemory):
    """What steps before and behind their time share: the copies, the thread, and the last hook before a step.

    See [Note: two copies of the state].

    Args:
        tier: whose cores a step runs on.

    Attributes:
        shadows: of the buckets that are stepped so.
        hindrance: why another bucket is not; None where all are that may be.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], tier: Tier):
        self._optimizers = optimizers
        self.shadows: dict[Bucket, Shadow] = {}
        self.hindrance: str | None = None
        self._most_copy_bytes = 0
        self._hooks: dict[torch.optim.Optimizer, torch.utils.hooks.RemovableHandle] = {}
        # Steps of a bucket follow each other there, also those that are forgotten.
        self._thread = StepThread(tier.cores, tier.device)

    @abstractmethod
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called in each step of the optimizer, behind all other hooks. It then goes over the gradients that are left."""

    @abstractmethod
    def _admits(self, copy_bytes: int) -> bool:
        """Whether one more bucket, whose copies take that much, is stepped on copies."""

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if not bucket.tier.is_apart:
                continue
            trial = try_step(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
            hindrance = hindrance_of(optimizer, bucket, trial)
            if trial is None or hindrance is not None:
                self.hindrance = hindrance
                continue
            element_bytes = sum(dtype.itemsize for _, dtype in trial.kinds) + bucket.precision.master.itemsize
            copy_bytes = bucket.layout.shard_numel * element_bytes
            if self._admits(copy_bytes):
                self.shadows[bucket] = Shadow(bucket, optimizer)
                self._most_copy_bytes += copy_bytes
        self._hooks[optimizer] = self._register(optimizer)

    def before_forward(self) -> None:
        for optimizer, hook in self._hooks.items():
            hook.remove()
            self._hooks[optimizer] = self._register(optimizer)

    def copy_bytes(self) -> int:
        return sum(shadow.nbytes() for shadow in self.shadows.values())

    def gradient_bytes(self) -> int:
        return self._thread.scratch_bytes

    def most_beside_bytes(self) -> int:
        return self._most_copy_bytes + max((bucket.gradient_bytes for bucket in self.shadows), default=0)

    def close(self, buckets: Sequence[Bucket]) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._thread.close()

    def _optimizer_of(self, bucket: Bucket) -> torch.optim.Optimizer:
        return self._optimizers[bucket.key.optimizer]

    def _start_step(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Future[Stepped]:
        return self._thread.submit(self._step, bucket, seen, arrival)

    def _step(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Stepped:
        arrival.wait()
        return self.shadows[bucket].step(
            seen, self._thread.scratch(bucket.gradient_bytes).view(bucket.precision.master)
        )

    def _register(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        return optimizer.register_step_pre_hook(WeakHook(self, SteppedOnCopies._on_step))

    def _on_step(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        self._before_step(optimizer)
