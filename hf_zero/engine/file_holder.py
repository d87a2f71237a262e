"""State in files: for each bucket one, fetched for the moment of its step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.transport import Transport
from ..device import allocate
from ..layout.intervals import Interval
from ..offload.nvme import NvmeTier
from ..offload.parameter_shards import Region
from ..offload.stored import StoredShard
from .bucket_steps import BucketSteps, OwnStep
from .buckets import Bucket, Row
from .holder import StateHolder, without_due
from .state_kinds import state_kinds
from .state_rows import MASTER

_HOST = torch.device("cpu")


class InFiles(StateHolder):
    """State that is away has a stand-in in the optimizer's register: its shape and dtype, without memory, reading as NaN.

    What is no stand-in there (freshly loaded, or made by the optimizer) is the state itself, and goes to the file at the
    next step of its bucket.

    Args:
        optimizers: that the engine trains with, in its order.
        transport: of the ranks that step together.
    """

    def __init__(self, tier: NvmeTier, optimizers: Sequence[torch.optim.Optimizer], transport: Transport):
        self._tier = tier
        self._transport = transport
        self._optimizers = optimizers
        self._shards: dict[Bucket, StoredShard] = {}
        self._absent: dict[torch.dtype, torch.Tensor] = {}
        self._steps: list[BucketSteps] = []

    def take(self, bucket: Bucket) -> None:
        if not bucket.trained or bucket.layout.key[2] < 0 or bucket.tier is not self._tier:
            return
        precision, kinds = bucket.precision, self._kinds(bucket)
        if not kinds:
            return
        shard = self._shards[bucket] = self._tier.store(bucket.name, bucket.layout.shard_numel, kinds)
        if MASTER in shard.dtypes:
            whole = Interval(0, bucket.layout.shard_numel)
            shard.write_part(MASTER, whole, bucket.master)
            bucket.put_away(self._stand_in(precision.master))

    def master_region(self, bucket: Bucket) -> Region | None:
        return (self._shards[bucket], MASTER) if bucket.is_away and not bucket.precision.rounds else None

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        mine = {bucket: self._shards[bucket] for bucket in buckets if bucket in self._shards}
        how = {"step": OwnStep(optimizer), "bring": self._bring, "put": self._put_back}
        self._steps.append(BucketSteps(optimizer, mine, self._tier.window, **how, transport=self._transport))

    def before_forward(self) -> None:
        for steps in self._steps:
            steps.come_last()

    def after_step(self, buckets: Sequence[Bucket]) -> None:
        for steps in self._steps:
            steps.give_back_gradients()
        # Called twice for a class of optimizer whose step calls its parent's.
        self._tier.end_step()
        super().after_step(buckets)

    @contextmanager
    def at_hand(self, bucket: Bucket) -> Iterator[None]:
        shard = self._shards.get(bucket)
        if shard is None or not bucket.is_away:
            yield
            return
        buffer = allocate(shard.nbytes, torch.uint8, _HOST)
        shard.read(buffer)
        bucket.bring(shard.views(buffer)[MASTER])
        yield
        bucket.put_away(self._stand_in(bucket.precision.master))
        shard.write(buffer)

    def values(self, row: Row, name: str, value: Any) -> Any:
        if not self._is_stand_in(value):
            return value
        self._refuse_broken()
        return self._shards[row.slot.bucket].read_part(name, row.layout.in_shard).view(row.tensor.shape)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_stand_in(tensor):
            return tensor
        self._refuse_broken()
        return self._shards[row.slot.bucket].mapped_part(kind, row.layout.in_shard)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        shard = self._shards.get(row.slot.bucket)
        kept = without_due(state)
        for name in shard.dtypes if shard is not None else ():
            if self._goes_to_a_file(row, kept.get(name)) and not self._is_stand_in(kept[name]):
                shard.write_part(name, row.layout.in_shard, kept[name].reshape(-1))
                kept[name] = self._stand_in(shard.dtypes[name]).expand(row.tensor.shape)
        return kept

    def put_master(self, row: Row, values: torch.Tensor) -> None:
        bucket = row.slot.bucket
        if bucket.is_away:
            self._shards[bucket].write_part(MASTER, row.layout.in_shard, values.reshape(-1))
            return
        with torch.no_grad():
            row.tensor.copy_(values.view(row.tensor.shape))

    def window_bytes(self) -> int:
        return self._tier.window.nbytes(list(self._shards.values()))

    def close(self, buckets: Sequence[Bucket]) -> None:
        for steps in self._steps:
            steps.release()
        for bucket in buckets:
            # Rows of a whole bucket are the parameters, whose state stays with the optimizer.
            for row in bucket.rows if bucket.whole and bucket in self._shards else ():
                state = self._register(bucket).get(row.tensor, {})
                for name, value in state.items():
                    state[name] = self.values(row, name, value)
        self._shards.clear()
        self._tier.close()

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

    def _register(self, bucket: Bucket) -> dict:
        return self._optimizers[bucket.layout.key[2]].state

    def _stand_in(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._absent:
            self._absent[dtype] = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        return self._absent[dtype]

    def _is_stand_in(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.data_ptr() == self._stand_in(value.dtype).data_ptr()

    def _goes_to_a_file(self, row: Row, value: Any) -> bool:
        # A parameter without dimensions has state that looks like a scalar, and stays in memory as scalars do.
        return torch.is_tensor(value) and value.dim() > 0 and value.shape == row.tensor.shape

    def _refuse_broken(self) -> None:
        for steps in self._steps:
            steps.refuse_broken()

    def _bring(self, bucket: Bucket, shard: StoredShard, buffer: torch.Tensor) -> None:
        self._exchange(bucket, shard, buffer, lambda row, name, value, view: view)
        if bucket.is_away:
            bucket.bring(shard.views(buffer)[MASTER])
            bucket.follow_edits()

    def _put_back(self, bucket: Bucket, shard: StoredShard, buffer: torch.Tensor) -> None:
        self._exchange(
            bucket, shard, buffer, lambda row, name, value, view: self._stand_in(view.dtype).expand(row.tensor.shape)
        )
        if MASTER in shard.dtypes:
            bucket.write_back()
            bucket.put_away(self._stand_in(bucket.precision.master))

    def _exchange(
        self,
        bucket: Bucket,
        shard: StoredShard,
        buffer: torch.Tensor,
        instead: Callable[[Row, str, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Puts `instead` into the register for each state tensor of the bucket, whose values then are in the buffer."""
        views, register = shard.views(buffer), self._register(bucket)
        for row in bucket.rows:
            # By `get`: the register makes an entry for whoever asks, and an empty one would look like a step taken.
            state = register.get(row.tensor)
            for name in views if state else ():
                value = state.get(name)
                if not self._goes_to_a_file(row, value):
                    continue
                view = row.of(views[name])
                if not self._is_stand_in(value) and value.data_ptr() != view.data_ptr():
                    view.copy_(value.view(view.shape))
                state[name] = instead(row, name, value, view)


class MastersInFiles(InFiles):
    """Optimizer state stays in memory beside parameters in files, whose masters are those files where digits are equal."""

    def _kinds(self, bucket: Bucket) -> tuple[tuple[str, torch.dtype], ...]:
        return () if bucket.precision.rounds else ((MASTER, bucket.precision.master),)
