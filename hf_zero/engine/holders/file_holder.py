"""State in files: for each bucket one, fetched for the moment of its step."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...comm.transport import Transport
from ...device import allocate
from ...layout.intervals import Interval
from ...offload.nvme import NvmeTier
from ...offload.parameter_shards import Region
from ...offload.stored import Kind, StoredShard
from ..buckets.bucket import Bucket, Row
from ..buckets.packed_state import PackedPart
from ..buckets.rows import MASTER
from ..state.bucket_steps import BucketSteps, OwnStep
from ..state.holder import without_due
from ..state.packed_moments import PackedMoments
from ..state.state_kinds import state_kinds
from .bucket_holder import SteppedByBucket
from .file_state import FileState, PackedFileState, packed_kinds

_HOST = torch.device("cpu")


class InFiles(SteppedByBucket):
    """State that is away has a stand-in in the optimizer's register: its shape and dtype, without memory, reading as NaN.

    Args:
        optimizers: that the engine trains with, in its order.
        transport: of the ranks that step together.
        packed: which moments are kept in 8-bit blocks.
    """

    def __init__(
        self,
        tier: NvmeTier,
        optimizers: Sequence[torch.optim.Optimizer],
        transport: Transport,
        packed: PackedMoments,
    ):
        super().__init__(optimizers)
        self._tier = tier
        self._transport = transport
        self._packed = packed
        self._files: dict[Bucket, FileState] = {}
        self._stand_ins = packed.stand_ins

    def take(self, bucket: Bucket) -> None:
        if not bucket.trained or bucket.key.optimizer < 0 or bucket.tier is not self._tier:
            return
        numel, kinds = bucket.layout.shard_numel, self._kinds(bucket)
        if self._has_master(bucket):
            kinds = (Kind(MASTER, bucket.precision.master, numel), *kinds)
        if not kinds:
            return
        shard = self._tier.store(bucket.name, kinds)
        self._files[bucket] = self._state_in(bucket, shard)
        if self._files[bucket].has_master:
            shard.write_part(MASTER, Interval(0, numel), bucket.master)
            bucket.put_away(self._files[bucket].absent_master())

    def master_region(self, bucket: Bucket) -> Region | None:
        return (self._files[bucket].shard, MASTER) if bucket.is_away and not bucket.precision.rounds else None

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        mine = {bucket: self._files[bucket].shard for bucket in buckets if bucket in self._files}
        step = OwnStep(optimizer)
        steps = BucketSteps(
            optimizer,
            mine,
            self._tier.window,
            step=step,
            transport=self._transport,
            bring=self._bring,
            put=self._put_back,
            take_over=self._take_over,
        )
        self._add(steps, step)
        for bucket in mine:
            self._put_earlier(optimizer, bucket)

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

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
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
        states = list(self._files.values())
        return self._tier.window.nbytes([state.shard for state in states]) + max(
            (state.lent_bytes for state in states), default=0
        )

    def state_bytes(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> int:
        there = self._files.get(bucket)
        return super().state_bytes(bucket, tensors) if there is None else there.state_bytes(tensors)

    def close(self, buckets: Sequence[Bucket]) -> None:
        super().close(buckets)
        self._fill_registers(buckets)
        self._files.clear()
        self._tier.close()

    def _take_over(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        """Called before the optimizer's buckets are stepped; returns those that have been already."""
        return ()

    def _has_master(self, bucket: Bucket) -> bool:
        """Whether its master goes to its file."""
        return bucket.precision.has_master

    def _kinds(self, bucket: Bucket) -> Sequence[Kind]:
        """What of its optimizer state goes there."""
        optimizer, numel = self._optimizer_of(bucket), bucket.layout.shard_numel
        if self._packed.takes(bucket):
            return packed_kinds(self._packed.codes_of(bucket), numel)
        kinds = state_kinds(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
        if kinds is None:
            raise ValueError(
                f"hf_zero: what state {type(optimizer).__name__} keeps cannot be seen by a trial step, so no file can be laid "
                "out for it. Use one of torch's optimizers, or `offload.optimizer: cpu`."
            )
        return [Kind(name, dtype, numel) for name, dtype in kinds]

    def _state_in(self, bucket: Bucket, shard: StoredShard) -> FileState:
        if self._packed.takes(bucket):
            return PackedFileState(bucket, shard, self._packed)
        return FileState(bucket, shard, self._stand_ins)

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

    def _has_master(self, bucket: Bucket) -> bool:
        return not bucket.precision.rounds

    def _kinds(self, bucket: Bucket) -> Sequence[Kind]:
        return ()
