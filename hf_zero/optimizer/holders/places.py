"""Where each bucket's master and optimizer state are."""

from collections.abc import Sequence

import torch

from ...buckets.bucket import Bucket
from ...buckets.rows import MASTER
from ...config import ZeroConfig
from ...offload.stored import Kind, StoredShard
from ...offload.tier import StateFiles, Tier
from ..state.bucket_state import BucketState, MasterPlace, Placeholders, StatePlace
from ..state.state_kinds import kinds_by_size, state_kinds
from .block_state import StateInBlocks
from .file_state import MasterInFile, MomentsInFile, StateInFile, kinds_in_blocks
from .packed_moments import MomentCodes, PackedMoments
from .rounded_master import RoundedMaster


class Places:
    """Chooses a place for each new bucket by the tier that the bucket is in, its precision and its moments.

    Args:
        tier: of buckets that are offloaded.
        optimizers: that the engine trains with, in its order.

    Attributes:
        placeholders: what the optimizers' registers have of state that is elsewhere.

    Raises:
        ConfigError: `moments: 8bit` for an optimizer whose state does not go into blocks.
    """

    def __init__(self, config: ZeroConfig, tier: Tier, optimizers: Sequence[torch.optim.Optimizer]):
        self._tier = tier
        self._optimizers = optimizers
        self._codes = MomentCodes(optimizers if config.quantises_moments else ())
        self.placeholders = Placeholders()

    def of(self, bucket: Bucket) -> BucketState:
        """Where the bucket's state is from now on. Makes its file, if it is to have one.

        Raises:
            ValueError: no trial step shows what a file would have to hold, or two things in it would have one name.
            OffloadError: there is no room for the file.
        """
        is_stepped = bucket.trained and bucket.key.optimizer >= 0
        optimizer = self._optimizers[bucket.key.optimizer] if is_stepped else None
        moments = PackedMoments(bucket, self._codes.of(bucket), self.placeholders)
        files = self._tier.files
        if files is None or optimizer is None or bucket.tier is not self._tier:
            return BucketState(bucket, optimizer, self._master_in_memory(bucket, optimizer), _in_memory(moments))
        return self._in_file(bucket, optimizer, moments, files)

    def _in_file(
        self, bucket: Bucket, optimizer: torch.optim.Optimizer, moments: PackedMoments, files: StateFiles
    ) -> BucketState:
        kinds = _kinds_in_file(bucket, optimizer, moments) if files.holds_state else []
        # Where files are those of parameters, only a master with the parameters' own digits is in one.
        has_master = bucket.precision.has_master and (files.holds_state or not bucket.precision.rounds)
        masters = [Kind(MASTER, bucket.precision.master, bucket.layout.shard_numel)] if has_master else []
        if not (masters or kinds):
            return BucketState(bucket, optimizer, MasterPlace(bucket), _in_memory(moments))
        if masters and any(kind.name == MASTER for kind in kinds):
            raise ValueError(
                f"hf_zero: {type(optimizer).__name__} keeps state that it calls {MASTER!r}, and so are the fp32 copies of "
                "parameters called in files. Give it another name, or use `offload.optimizer: cpu`."
            )
        shard = files.store(bucket.name, [*masters, *kinds])
        master = MasterInFile(bucket, shard, self.placeholders) if has_master else MasterPlace(bucket)
        state = self._state_in(shard, bucket, kinds, moments) if kinds else _in_memory(moments)
        return BucketState(bucket, optimizer, master, state, shard)

    def _state_in(
        self, shard: StoredShard, bucket: Bucket, kinds: Sequence[Kind], moments: PackedMoments
    ) -> StatePlace:
        if moments.codes:
            return MomentsInFile(bucket, shard, moments)
        return StateInFile(shard, [kind.name for kind in kinds], self.placeholders)

    def _master_in_memory(self, bucket: Bucket, optimizer: torch.optim.Optimizer | None) -> MasterPlace:
        is_rounded = bucket.trained and bucket.precision.stochastic
        return RoundedMaster(bucket, optimizer) if is_rounded else MasterPlace(bucket)


def _in_memory(moments: PackedMoments) -> StatePlace:
    return StateInBlocks(moments) if moments.codes else StatePlace()


def _kinds_in_file(bucket: Bucket, optimizer: torch.optim.Optimizer, moments: PackedMoments) -> list[Kind]:
    """What of its optimizer state goes to a bucket's file."""
    numel = bucket.layout.shard_numel
    if moments.codes:
        return kinds_in_blocks(moments.codes, numel)
    kinds = state_kinds(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
    if kinds_by_size(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master):
        raise ValueError(
            f"hf_zero: {type(optimizer).__name__} keeps other state for large parameters than for small ones, and a file has one "
            "place for both. Use `offload.optimizer: cpu`, or torch.optim.AdamW with `moments: 8bit`."
        )
    if kinds is None:
        raise ValueError(
            f"hf_zero: what state {type(optimizer).__name__} keeps cannot be seen by a trial step, so no file can be laid out "
            "for it. Use one of torch's optimizers, or `offload.optimizer: cpu`."
        )
    return [Kind(name, dtype, numel) for name, dtype in kinds]
