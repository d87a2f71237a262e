"""State in host memory that is stepped on copies, in a thread beside training."""

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..device import Arrival, allocate
from .buckets import Bucket
from .holder import InMemory
from .hooks import WeakHook
from .shadow import Seen, Shadow, Stepped
from .state_kinds import Trial, try_step

_HOST = torch.device("cpu")


class SteppedOnCopies(InMemory):
    """What steps before and behind their time share: the copies, the thread, and the last hook before a step.

    See [Note: two copies of the state].

    Args:
        threads: of the host that a step runs on.

    Attributes:
        shadows: of the buckets that are stepped so.
        hindrance: why another bucket is not; None where all are that may be.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], threads: int):
        self._optimizers = optimizers
        self.shadows: dict[Bucket, Shadow] = {}
        self.hindrance: str | None = None
        self._scratch: torch.Tensor | None = None
        self._hooks: dict[torch.optim.Optimizer, torch.utils.hooks.RemovableHandle] = {}
        # One thread: steps of a bucket follow each other, also those that are forgotten.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_zero-step")
        before = torch.get_num_threads()
        self._thread.submit(_run_on, threads).result()
        # What a thread sets for itself is what threads that start later have too, until another sets it.
        torch.set_num_threads(before)

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
            trial = try_step(optimizer, optimizer.param_groups[bucket.layout.key[3]], bucket.precision.master)
            hindrance = _hindrance(optimizer, bucket, trial)
            if hindrance is not None:
                self.hindrance = hindrance
                continue
            element_bytes = sum(dtype.itemsize for _, dtype in trial.kinds) + bucket.precision.master.itemsize
            if self._admits(bucket.layout.shard_numel * element_bytes):
                self.shadows[bucket] = Shadow(bucket, optimizer)
        self._hooks[optimizer] = self._register(optimizer)

    def before_forward(self) -> None:
        for optimizer, hook in self._hooks.items():
            hook.remove()
            self._hooks[optimizer] = self._register(optimizer)

    def copy_bytes(self) -> int:
        return sum(shadow.nbytes() for shadow in self.shadows.values())

    def close(self, buckets: Sequence[Bucket]) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._thread.shutdown()

    def _optimizer_of(self, bucket: Bucket) -> torch.optim.Optimizer:
        return self._optimizers[bucket.layout.key[2]]

    def _start_step(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Future[Stepped]:
        return self._thread.submit(self._step, bucket, seen, arrival)

    def _step(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Stepped:
        arrival.wait()
        shadow = self.shadows[bucket]
        if self._scratch is None:
            nbytes = max(shadow.scratch_bytes for shadow in self.shadows.values())
            self._scratch = allocate(nbytes, torch.uint8, _HOST)
        return shadow.step(seen, self._scratch[: shadow.scratch_bytes].view(bucket.precision.master))

    def _register(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        return optimizer.register_step_pre_hook(WeakHook(self, SteppedOnCopies._on_step))

    def _on_step(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        self._before_step(optimizer)


def _run_on(threads: int) -> None:
    """Has this thread's operations run on so many."""
    # torch takes the process's number into each thread at its first question, and would do so after this.
    torch.get_num_threads()
    torch.set_num_threads(threads)


def _hindrance(optimizer: torch.optim.Optimizer, bucket: Bucket, trial: Trial | None) -> str | None:
    """Why the bucket cannot be stepped by itself and not in its time; None if it can."""
    if bucket.layout.intact:
        # It may look at more than one of them, too: LAMB in some forms takes a norm over all.
        return f"{type(optimizer).__name__} looks at whole parameters"
    return trial.hindrance if trial else f"{type(optimizer).__name__} cannot be tried beforehand"
