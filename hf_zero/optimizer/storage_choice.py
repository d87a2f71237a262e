"""Chooses where the state of each bucket is stored."""

from collections.abc import Sequence

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import MASTER
from ..config import ZeroConfig
from ..layout.blocks import has_blocks
from ..offload.files import Kind, StoredShard
from ..offload.state_files import StateFiles
from ..offload.tiers import Tier
from .bucket_state import BucketState, MasterStorage, Placeholders, StateStorage
from .copied_master import CopiedMaster
from .moments_in_blocks import PackedMoments, StateInBlocks, codes_of_groups
from .rounded_master import RoundedMaster
from .state_in_files import MasterInFile, MomentsInFile, StateInFile, kinds_in_blocks
from .state_on_host import MasterOnHost, StateOnHost
from .trial_step import kinds_by_size, state_kinds


class StorageChoice:
    """Chooses the storage of each new bucket's state by its tier, precision and moments.

    Args:
        tier: the tier of offloaded buckets.
        optimizers: the engine's optimizers, in order.

    Attributes:
        placeholders: represent state stored elsewhere in `optimizer.state`.

    Raises:
        ConfigError: `moments: 8bit` for an optimizer whose state cannot be stored in blocks.
    """

    def __init__(self, config: ZeroConfig, tier: Tier, optimizers: Sequence[torch.optim.Optimizer]):
        self._tier = tier
        self._optimizers = optimizers
        # Only for `moments: 8bit`, because otherwise an optimizer may keep state unseen by a trial step.
        self._codes = codes_of_groups(optimizers if config.quantizes_moments else ())
        self.placeholders = Placeholders()

    def of(self, bucket: Bucket) -> BucketState:
        """Chooses the storage of a bucket, and creates its file if needed.

        Raises:
            ValueError: no trial step shows the state for a file, or two regions would have the same name.
            OffloadError: the disk is full.
        """
        is_stepped = bucket.trained and bucket.key.optimizer >= 0
        optimizer = self._optimizers[bucket.key.optimizer] if is_stepped else None
        codes = self._codes.get((bucket.key.optimizer, bucket.key.group), {})
        is_in_blocks = bucket.trained and has_blocks(bucket.layout)
        moments = PackedMoments(bucket, codes if is_in_blocks else {}, self.placeholders)
        files, window = self._tier.files, bucket.tier.window
        if window is not None and optimizer is not None:
            master = self._master_in_memory(bucket, optimizer)
            if bucket.precision.keeps_master:
                master = MasterOnHost(bucket, window, self.placeholders)
            return BucketState(bucket, optimizer, master, StateOnHost(bucket, _in_memory(moments), window))
        # With `offload.ratio` below 1, the last buckets use the device's tier, without files.
        if files is None or optimizer is None or bucket.tier is not self._tier:
            return BucketState(bucket, optimizer, self._master_in_memory(bucket, optimizer), _in_memory(moments))
        return self._in_file(bucket, optimizer, moments, files)

    def _in_file(
        self, bucket: Bucket, optimizer: torch.optim.Optimizer, moments: PackedMoments, files: StateFiles
    ) -> BucketState:
        kinds = _kinds_in_file(bucket, optimizer, moments) if files.holds_state else []
        # If the files only belong to parameters, a master is only in a file if its dtype is the parameters' own.
        precision = bucket.precision
        has_master = precision.has_master and not precision.is_copied and (files.holds_state or not precision.rounds)
        masters = [Kind(MASTER, precision.master, bucket.layout.shard_numel)] if has_master else []
        in_memory = CopiedMaster(bucket, self.placeholders) if precision.is_copied else MasterStorage(bucket)
        if not (masters or kinds):
            return BucketState(bucket, optimizer, in_memory, _in_memory(moments))
        if masters and any(kind.name == MASTER for kind in kinds):
            raise ValueError(
                f"hf_zero: {type(optimizer).__name__} names a state {MASTER!r}, which is the name of the fp32 copies of "
                "parameters in files. Use a different name, or use `offload.optimizer: cpu`."
            )
        shard = files.store(bucket.name, [*masters, *kinds])
        master = MasterInFile(bucket, shard, self.placeholders) if has_master else in_memory
        state = self._state_in(shard, bucket, kinds, moments) if kinds else _in_memory(moments)
        return BucketState(bucket, optimizer, master, state, shard)

    def _state_in(
        self, shard: StoredShard, bucket: Bucket, kinds: Sequence[Kind], moments: PackedMoments
    ) -> StateStorage:
        if moments.codes:
            return MomentsInFile(bucket, shard, moments)
        return StateInFile(shard, [kind.name for kind in kinds], self.placeholders)

    def _master_in_memory(self, bucket: Bucket, optimizer: torch.optim.Optimizer | None) -> MasterStorage:
        is_rounded = bucket.trained and bucket.precision.stochastic
        return RoundedMaster(bucket, optimizer) if is_rounded else MasterStorage(bucket)


def _in_memory(moments: PackedMoments) -> StateStorage:
    return StateInBlocks(moments) if moments.codes else StateStorage()


def _kinds_in_file(bucket: Bucket, optimizer: torch.optim.Optimizer, moments: PackedMoments) -> list[Kind]:
    """Lists the regions of optimizer state in a bucket's file."""
    numel = bucket.layout.shard_numel
    if moments.codes:
        return kinds_in_blocks(moments.codes, numel)
    kinds = state_kinds(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
    if kinds_by_size(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master):
        raise ValueError(
            f"hf_zero: {type(optimizer).__name__} keeps different state for large and small parameters, but in files the state "
            "must be the same for both. Use `offload.optimizer: cpu`, or torch.optim.AdamW with `moments: 8bit`."
        )
    if kinds is None:
        raise ValueError(
            f"hf_zero: a trial step cannot determine the state of {type(optimizer).__name__}, so hf_zero cannot lay out a file "
            "for it. Use one of torch's optimizers, or `offload.optimizer: cpu`."
        )
    return [Kind(name, dtype, numel) for name, dtype in kinds]
