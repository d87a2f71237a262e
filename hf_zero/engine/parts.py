"""The parts of an engine."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..buckets.all_buckets import unsharded
from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..comm.groups import Groups
from ..config import ZeroConfig
from ..offload.activations import ActivationsInHostMemory
from ..offload.shards import ParameterTier
from ..offload.tiers import Tier
from ..optimizer.replicas import ReplicaCheck
from ..optimizer.storage import OptimizerStorage
from ..optimizer.trial import Finding
from ..stage3.sharded_model import ShardedModel
from ..step.nonfinite import NonFiniteCheck
from ..step.norm import GradientNorm
from ..step.parameter_gather import ParameterGather
from .buffers import ModelBuffers
from .exact_weights import ExactWeights
from .parameter_places import ParameterPlaces
from .split_model import CopyChecks, Mesh, SplitModel
from .wire import Wire


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an engine.

    Attributes:
        config: the config, in which each `auto` that is tried before training has a value.
        device: the training device, with its index.
        all_buckets: the buckets of trained and frozen parameters, by their index.
        buckets: the buckets of trained parameters.
        slot_of: the slot of every trained parameter in its bucket.
        row_of: this rank's row of each trained parameter with elements on this rank.
        scopes: for each optimizer, whether its parameters may be cut, and the reason.
        copies: checks of the model's copies; None unless the model is split over ranks.
        model_buffers: the broadcast buffers of each model; empty if each rank keeps its own.
        activations: None if activations stay on the device.
        replicas: None unless `check_replicas_every` is set.
        outer: `SyncedEvery` of the extra `wire`; None if all ranks run each step together.
    """

    config: ZeroConfig
    device: torch.device
    mesh: Mesh
    groups: Groups
    split: SplitModel
    tier: Tier
    parameter_tier: ParameterTier
    nonfinite: NonFiniteCheck
    storage: OptimizerStorage
    wire: Wire
    all_buckets: list[Bucket]
    buckets: list[Bucket]
    slot_of: dict[nn.Parameter, ParameterSlot]
    row_of: dict[nn.Parameter, Row]
    scopes: list[Finding]
    sharded: ShardedModel
    outer: Any
    model_buffers: dict[nn.Module, ModelBuffers]
    parameter_gather: ParameterGather
    exact: ExactWeights
    parameter_places: ParameterPlaces
    activations: ActivationsInHostMemory | None
    norm: GradientNorm
    replicas: ReplicaCheck | None
    copies: CopyChecks | None

    def end_reads(self) -> None:
        """Ends all reads of rows before a write: gathers that send from the shards, and copies that read the masters."""
        self.parameter_gather.finish_all()
        if self.tier.is_offloaded:
            self.tier.h2d.wait()
        if not self.sharded.is_empty:
            self.sharded.schedule.reshard_all()

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Starts sending this rank's part of some buckets to the ranks with whole parameters."""
        if self.groups.shard_size > 1:
            self.parameter_gather.start(unsharded(buckets))
