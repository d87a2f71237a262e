"""Steps on copies of the state, taken beside training."""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import closing
from queue import SimpleQueue

import torch

from ...buckets.bucket import Bucket
from ...buckets.rows import MASTER
from ...device import Arrival
from ...offload.stored import ReadRegion
from ...offload.tier import StateFiles, Tier
from ..state.bucket_state import BucketState, Placeholders
from ..state.state_kinds import Trial, try_step
from .double import Double, Stepped
from .seen_step import Seen
from .step_thread import StepThread


class StepsBeside:
    """The doubles of buckets, and the threads that step them.

    Arithmetic is done by one thread, so that steps follow each other. What is in a file is read before and written behind by
    the threads that do so for steps in their time, with as many buffers as those have.

    Args:
        tier: whose cores a step runs on.
        files: the tier whose files hold state; None where there are none.

    Attributes:
        doubles: of the buckets that are stepped so.
    """

    def __init__(self, tier: Tier, files: StateFiles | None, placeholders: Placeholders):
        self._files = files
        self._placeholders = placeholders
        self._thread = StepThread(tier.cores, tier.device)
        self._buffers = self._no_buffers()
        self._running: dict[Bucket, Future[Stepped]] = {}
        self.doubles: dict[Bucket, Double] = {}
        self._most_copy_bytes = 0

    def add(self, optimizer: torch.optim.Optimizer, state: BucketState, memory_bytes: int) -> None:
        """Has a bucket stepped here, whose copies come to `memory_bytes` in memory."""
        self.doubles[state.bucket] = Double(state, optimizer)
        self._most_copy_bytes += memory_bytes

    def of(self, optimizer: torch.optim.Optimizer) -> list[Bucket]:
        """The optimizer's buckets that are stepped here."""
        return [bucket for bucket, double in self.doubles.items() if double.optimizer is optimizer]

    def start(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Future[Stepped]:
        """Begins the step that `seen` describes, once the gradient has arrived."""
        double = self.doubles[bucket]
        if self._files is None or double.state.shard is None:
            self._running[bucket] = self._thread.submit(self._step_in_memory, double, seen, arrival)
        else:
            before = [self._running[bucket]] if bucket in self._running else []
            self._running[bucket] = self._files.window.submit(self._step_by_file, double, seen, arrival, before)
        return self._running[bucket]

    def end(self) -> None:
        """Waits for all that has begun. What has failed is raised where its result is taken."""
        wait(self._running.values())
        self._running.clear()

    def give_back_buffers(self) -> None:
        """Leaves the memory of buffers to the steps that still have them."""
        self._buffers = self._no_buffers()

    def take_over(self, stepped: dict[Bucket, Stepped]) -> None:
        """Makes these steps the buckets' state, and has parameters follow masters in files.

        Raises:
            OffloadError: a file failed.
        """
        for bucket, states in stepped.items():
            self.doubles[bucket].take_over(states)
        shards = {bucket: self.doubles[bucket].state.shard for bucket in stepped if bucket.is_away}
        followed = {ReadRegion(shard, MASTER): b for b, shard in shards.items() if shard and b.has_second_copy}
        if self._files is None or not followed:
            return
        with closing(self._files.window.walk(list(followed))) as walk:
            for region, buffer in walk:
                bucket = followed[region]
                bucket.bring(region.values(buffer))
                bucket.write_back()
                bucket.put_away(self._placeholders.of((), bucket.precision.master))

    def copy_bytes(self) -> int:
        """Bytes of copies of state in memory."""
        return sum(double.nbytes for double in self.doubles.values())

    def file_copy_bytes(self) -> int:
        """Bytes of copies of state in files."""
        shards = (double.state.shard for double in self.doubles.values())
        return sum(shard.nbytes for shard in shards if shard is not None)

    @property
    def scratch_bytes(self) -> int:
        """Memory for the gradients of the step that is taken."""
        return self._thread.scratch_bytes

    @property
    def most_bytes(self) -> int:
        """Memory that all copies and `scratch_bytes` come to."""
        return self._most_copy_bytes + max((bucket.gradient_bytes for bucket in self.doubles), default=0)

    def close(self) -> None:
        wait(self._running.values())
        self._thread.close()

    def _step_in_memory(self, double: Double, seen: Seen, arrival: Arrival) -> Stepped:
        arrival.wait()
        return self._step(double, seen, None)

    def _step_by_file(self, double: Double, seen: Seen, arrival: Arrival, before: Iterable[Future[Stepped]]) -> Stepped:
        """Takes a step into the other side of the bucket's file. `before`: one of the same bucket that has been forgotten."""
        wait(before)
        buffers, shard = self._buffers, double.state.shard
        buffer = buffers.get()
        if self._files is None or shard is None:
            raise AssertionError("hf_zero: a bucket without a file was to be stepped in one; please report this")
        if buffer is None:
            buffer = self._files.window.make_buffer(self._largest)
        try:
            shard.read(buffer)
            arrival.wait()
            stepped = self._thread.submit(self._step, double, seen, buffer).result()
            shard.write_aside(buffer)
            return stepped
        finally:
            buffers.put(buffer)

    def _step(self, double: Double, seen: Seen, buffer: torch.Tensor | None) -> Stepped:
        bucket = double.state.bucket
        scratch = self._thread.scratch(bucket.gradient_bytes).view(bucket.precision.master)
        return double.step(seen, scratch, buffer)

    @property
    def _largest(self) -> int:
        shards = (double.state.shard for double in self.doubles.values())
        return max(shard.nbytes for shard in shards if shard is not None)

    def _no_buffers(self) -> SimpleQueue[torch.Tensor | None]:
        """As many places as there may be buffers, each of which gets one when it is first used."""
        buffers: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        for _ in range(0 if self._files is None else self._files.window.size + 1):
            buffers.put(None)
        return buffers


def try_aside(optimizer: torch.optim.Optimizer, state: BucketState) -> tuple[Trial | None, str | None]:
    """(what a trial step of the bucket's group shows, why the bucket cannot be stepped by itself and not in its time).

    The second is None if it can; the first is not None then.
    """
    bucket, name = state.bucket, type(optimizer).__name__
    trial = try_step(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
    if bucket.layout.intact:
        # It may look at more than one of them, too: LAMB in some forms takes a norm over all.
        return trial, f"{name} looks at whole parameters"
    if trial is None:
        return None, f"{name} cannot be tried beforehand"
    if state.shard is not None and not state.master.is_away:
        # A layer that backward has yet to gather comes from there.
        return trial, "masters are the parameters themselves, in host memory"
    return trial, trial.hindrance


def memory_bytes(state: BucketState, trial: Trial) -> int:
    """Memory that a bucket's copies come to."""
    of_state = state.state.most_aside_bytes(state.bucket, [dtype for _, dtype in trial.kinds])
    return state.master.most_aside_bytes + of_state
