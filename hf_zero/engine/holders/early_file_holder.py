"""Steps of state in files that are taken while backward goes on."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from queue import SimpleQueue

import torch

from ...comm.transport import Transport
from ...device import Arrival
from ...offload.nvme import NvmeTier
from ...offload.stored import ReadRegion
from ..buckets.bucket import Bucket
from ..buckets.rows import MASTER
from ..report_tables import EarlyReport
from ..state.packed_moments import PackedMoments
from ..state.state_kinds import try_step
from .early_steps import EarlySteps
from .file_holder import InFiles
from .step_copies import Seen, Stepped, copied, hindrance_of, look, step_doubles
from .step_thread import StepThread


class InFilesEarly(InFiles):
    """A bucket's state is read, stepped and written to the other side of its file as soon as its gradient has landed.

    `optimizer.step()` exchanges the sides, and brings masters to their parameters; what it forgets has changed nothing. See
    [Note: two sides of a file]. The buffers are as many as a step in its time has.

    Args:
        most_bytes: that second sides may take. Buckets beyond it, in the order in which gradients arrive, wait for the step.

    Attributes:
        early: which steps have been begun.
    """

    steps_early = True

    def __init__(
        self,
        tier: NvmeTier,
        optimizers: Sequence[torch.optim.Optimizer],
        transport: Transport,
        packed: PackedMoments,
        *,
        most_bytes: int,
    ):
        super().__init__(tier, optimizers, transport, packed)
        self._left_bytes = most_bytes
        self._two_sided: set[Bucket] = set()
        self._bucket_count = 0
        self._hindrance: str | None = None
        self._thread = StepThread(tier.cores, tier.device)
        self._buffers = _no_buffers(tier.window.size + 1)
        self._running: dict[Bucket, Future[Stepped]] = {}
        self.early = EarlySteps(self._look, self._start_step)

    def take(self, bucket: Bucket) -> None:
        super().take(bucket)
        if bucket not in self._files:
            return
        optimizer = self._optimizer_of(bucket)
        trial = try_step(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
        hindrance = hindrance_of(optimizer, bucket, trial)
        if hindrance is None and not self._files[bucket].has_master:
            # A layer that backward has yet to gather comes from there.
            hindrance = "masters are the parameters themselves, in host memory"
        if hindrance is not None:
            self._hindrance = hindrance
            return
        shard = self._files[bucket].shard
        self._left_bytes -= shard.nbytes
        if self._left_bytes >= 0:
            shard.add_side()
            self._two_sided.add(bucket)

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().step_with(optimizer, buckets)
        self._bucket_count += len(buckets)

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        # An edited parameter has another master than the file.
        may_begin = bucket in self._two_sided and not bucket.edited_rows
        self.early.landed(bucket, arrival, may_begin=may_begin)

    def early_report(self) -> EarlyReport:
        return EarlyReport(
            buckets=len(self._two_sided),
            all_buckets=self._bucket_count,
            kept=self.early.kept,
            forgotten=self.early.forgotten,
            hindrance=self._hindrance,
        )

    def copy_bytes(self) -> int:
        return sum(self._files[bucket].shard.nbytes for bucket in self._two_sided)

    def gradient_bytes(self) -> int:
        return self._thread.scratch_bytes

    def most_beside_bytes(self) -> int:
        return max((bucket.gradient_bytes for bucket in self._two_sided), default=0)

    def close(self, buckets: Sequence[Bucket]) -> None:
        self.early.clear()
        wait(self._running.values())
        self._thread.close()
        self._two_sided.clear()
        super().close(buckets)

    def _look(self, bucket: Bucket) -> Seen:
        shard = self._files[bucket].shard
        parameters = tuple((row.slot.parameter, row.slot.parameter._version) for row in bucket.rows)
        return look(bucket, self._optimizer_of(bucket)).with_marks((shard, shard.edition), *parameters)

    def _start_step(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Future[Stepped]:
        before = [self._running[bucket]] if bucket in self._running else []
        self._running[bucket] = self._tier.window.submit(self._step_aside, bucket, seen, arrival, before)
        return self._running[bucket]

    def _step_aside(self, bucket: Bucket, seen: Seen, arrival: Arrival, before: list[Future[Stepped]]) -> Stepped:
        """Takes the step that `seen` describes into the other side of the bucket's file.

        Args:
            before: a step of the same bucket that has been forgotten.
        """
        wait(before)
        buffer = self._buffers.get()
        if buffer is None:
            buffer = self._tier.window.make_buffer(max(self._files[other].shard.nbytes for other in self._two_sided))
        try:
            shard = self._files[bucket].shard
            shard.read(buffer)
            arrival.wait()
            stepped = self._thread.submit(self._step, bucket, seen, buffer).result()
            shard.write_aside(buffer)
            return stepped
        finally:
            self._buffers.put(buffer)

    @torch.no_grad()
    def _step(self, bucket: Bucket, seen: Seen, buffer: torch.Tensor) -> Stepped:
        file = self._files[bucket]
        states = {row: dict(state) for row, _, state in seen.rows}
        file.lend(states, buffer)
        for row, _, state in seen.rows:
            # Scalars, which are in no file.
            states[row] |= {name: copied(value) for name, value in state.items() if states[row][name] is value}
        scratch = self._thread.scratch(bucket.gradient_bytes).view(bucket.precision.master)
        states = step_doubles(self._optimizer_of(bucket), seen, file.master(buffer), states, scratch)
        file.take_back(states, buffer)
        return Stepped(None, states)

    def _take_over(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        held = self.early.take(lambda bucket: self._optimizer_of(bucket) is optimizer)
        wait(self._running.values())
        self._buffers = _no_buffers(self._tier.window.size + 1)
        for bucket, stepped in held.items():
            self._files[bucket].shard.exchange()
            for row, state in stepped.states.items():
                register = optimizer.state[row.tensor]
                register.clear()
                register.update(state)
        self._bring_masters([bucket for bucket in held if bucket.has_second_copy])
        return held.keys()

    def _bring_masters(self, buckets: Sequence[Bucket]) -> None:
        """Has the buckets' parameters follow their masters in the files."""
        bucket_of = {ReadRegion(self._files[bucket].shard, MASTER): bucket for bucket in buckets}
        with closing(self._tier.window.walk(list(bucket_of))) as walk:
            for region, buffer in walk:
                bucket = bucket_of[region]
                bucket.bring(region.values(buffer))
                bucket.write_back()
                bucket.put_away(self._files[bucket].absent_master())


def _no_buffers(places: int) -> SimpleQueue[torch.Tensor | None]:
    """As many places as there may be buffers, each of which gets one when it is first used."""
    buffers: SimpleQueue[torch.Tensor | None] = SimpleQueue()
    for _ in range(places):
        buffers.put(None)
    return buffers
