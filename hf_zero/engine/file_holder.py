"""State in files: for each bucket one, fetched for the moment of its step."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.transport import Transport
from ..device import allocate
from ..layout.intervals import Interval
from ..offload.nvme import NvmeTier
from ..offload.parameter_shards import Region
from ..offload.stored import StoredShard
from .bucket_holder import SteppedByBucket
from .bucket_steps import BucketSteps, OwnStep
from .buckets import Bucket, Row
from .file_state import FileState
from .holder import without_due
from .stand_ins import StandIns
from .state_kinds import state_kinds
from .state_rows import MASTER

_HOST = torch.device("cpu")


class InFiles(SteppedByBucket):
    """State that is away has a stand-in in the optimizer's register: its shape and dtype, without memory, reading as NaN.

    Args:
        optimizers: that the engine trains with, in its order.
        transport: of the ranks that step together.
    """

    def __init__(self, tier: NvmeTier, optimizers: Sequence[torch.optim.Optimizer], transport: Transport):
        super().__init__()
        self._tier = tier
        self._transport = transport
        self._optimizers = optimizers
        self._files: dict[Bucket, FileState] = {}
        self._stand_ins = StandIns()

    def take(self, bucket: Bucket) -> None:
        if not bucket.trained or bucket.layout.key[2] < 0 or bucket.tier is not self._tier:
            return
        kinds = self._kinds(bucket)
        if not kinds:
            return
        shard = self._tier.store(bucket.name, bucket.layout.shard_numel, kinds)
        state = self._files[bucket] = FileState(bucket, shard, self._stand_ins)
        if state.has_master:
            shard.write_part(MASTER, Interval(0, bucket.layout.shard_numel), bucket.master)
            bucket.put_away(state.absent_master())

    def master_region(self, bucket: Bucket) -> Region | None:
        return (self._files[bucket].shard, MASTER) if bucket.is_away and not bucket.precision.rounds else None

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        mine = {bucket: self._files[bucket].shard for bucket in buckets if bucket in self._files}
        how = {"bring": self._bring, "put": self._put_back, "take_over": self._take_over}
        step = OwnStep(optimizer)
        self._add(BucketSteps(optimizer, mine, self._tier.window, step=step, **how, transport=self._transport), step)

    def after_step(self, buckets: Sequence[Bucket]) -> None:
        # Called twice for a class of optimizer whose step calls its parent's.
        self._tier.end_step()
        super().after_step(buckets)

    @contextmanager
    def at_hand(self, bucket: Bucket) -> Iterator[None]:
        if bucket not in self._files or not bucket.is_away:
            yield
            return
        state = self._files[bucket]
        buffer = allocate(state.shard.nbytes, torch.uint8, _HOST)
        state.shard.read(buffer)
        bucket.bring(state.master(buffer))
        yield
        bucket.put_away(state.absent_master())
        state.shard.write(buffer)

    def values(self, row: Row, name: str, value: Any) -> Any:
        if not self._stand_ins.has(value):
            return value
        self._refuse_broken()
        return self._files[row.slot.bucket].values(row, name)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._stand_ins.has(tensor):
            return tensor
        self._refuse_broken()
        return self._files[row.slot.bucket].view(row, kind)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        kept, there = without_due(state), self._files.get(row.slot.bucket)
        return kept if there is None else there.put(row, kept)

    def put_master(self, row: Row, values: torch.Tensor) -> None:
        bucket = row.slot.bucket
        if bucket.is_away:
            self._files[bucket].shard.write_part(MASTER, row.layout.in_shard, values.reshape(-1))
            return
        with torch.no_grad():
            row.tensor.copy_(values.view(row.tensor.shape))

    def window_bytes(self) -> int:
        return self._tier.window.nbytes([state.shard for state in self._files.values()])

    def close(self, buckets: Sequence[Bucket]) -> None:
        super().close(buckets)
        for bucket in buckets:
            # Rows of a whole bucket are the parameters, whose state stays with the optimizer.
            for row, state in self._states_of(bucket).items() if bucket.whole and bucket in self._files else ():
                for name, value in state.items():
                    state[name] = self.values(row, name, value)
        self._files.clear()
        self._tier.close()

    def _take_over(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        """Called before the optimizer's buckets are stepped; returns those that have been already."""
        return ()

    def _kinds(self, bucket: Bucket) -> tuple[tuple[str, torch.dtype], ...]:
        """What of a bucket goes to its file."""
        index, group = bucket.layout.key[2:]
        precision, optimizer = bucket.precision, self._optimizers[index]
        kinds = state_kinds(optimizer, optimizer.param_groups[group], precision.master)
        if kinds is None:
            raise ValueError(
                f"hf_zero: what state {type(optimizer).__name__} keeps cannot be seen by a trial step, so no file can be laid "
                "out for it. Use one of torch's optimizers, or `offload.optimizer: cpu`."
            )
        return ((MASTER, precision.master), *kinds) if precision.has_master else kinds

    def _optimizer_of(self, bucket: Bucket) -> torch.optim.Optimizer:
        return self._optimizers[bucket.layout.key[2]]

    def _states_of(self, bucket: Bucket) -> Mapping[Row, dict[str, Any]]:
        # Not by the register's own brackets: it makes an entry for whoever asks, and an empty one would look like a step taken.
        register = self._optimizer_of(bucket).state
        return {row: register[row.tensor] for row in bucket.rows if row.tensor in register}

    def _refuse_broken(self) -> None:
        for steps in self._steps:
            steps.refuse_broken()

    def _bring(self, bucket: Bucket, _shard: StoredShard, buffer: torch.Tensor) -> None:
        state = self._files[bucket]
        state.lend(self._states_of(bucket), buffer)
        if bucket.is_away:
            bucket.bring(state.master(buffer))
            bucket.follow_edits()

    def _put_back(self, bucket: Bucket, _shard: StoredShard, buffer: torch.Tensor) -> None:
        state = self._files[bucket]
        state.take_back(self._states_of(bucket), buffer)
        if state.has_master:
            bucket.write_back()
            bucket.put_away(state.absent_master())


class MastersInFiles(InFiles):
    """Optimizer state stays in memory beside parameters in files, whose masters are those files where digits are equal."""

    def _kinds(self, bucket: Bucket) -> tuple[tuple[str, torch.dtype], ...]:
        return () if bucket.precision.rounds else ((MASTER, bucket.precision.master),)
