"""The dimensions of a run's ranks: data parallel, and those that split a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.groups import Groups
from ..comm.ledger import Ledger
from ..comm.transport import Agreement, DataParallelGroup, LocalTransport, ModelCopies, Transport
from ..comm.transports import choose_group, choose_transport
from ..config import CommConfig, ZeroConfig
from .split_model import SplitModel


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The groups of ranks that this rank is in.

    Attributes:
        split: the model's parameters of which a rank has a part, by tensor or expert parallelism.
        world_groups, world: of all ranks of the run.
        dp: the ranks that hold the same part of the model.
        expert_dp: the same for experts that are split over more ranks than compute a batch together; else `dp`.
        tp: between the ranks that compute a batch together; this rank alone, unless the model is split.
        model_parallel: between the ranks that hold one copy of the model together; `tp`, but for such experts.
    """

    split: SplitModel
    world_groups: Groups
    world: Transport
    dp: DataParallelGroup
    expert_dp: DataParallelGroup
    tp: Transport
    model_parallel: Transport

    @classmethod
    def create(cls, split: SplitModel, config: ZeroConfig, device: torch.device) -> "Mesh":
        """Makes the groups of a run. Collective."""
        comm = config.comm
        if split.is_empty:
            dp = _data_parallel(config, device)
            alone, groups, world = LocalTransport(dp.transport.ledger), dp.all_groups, dp.all_transport
            return cls(
                split=split, world_groups=groups, world=world, dp=dp, expert_dp=dp, tp=alone, model_parallel=alone
            )
        # All ranks, and those of a copy, have no state of their own to share: they only agree.
        plain = CommConfig(timeout_s=comm.timeout_s, late_s=comm.late_s, node_size=comm.node_size)
        groups = Groups.create(stage=1, device_type=device.type, comm=plain)
        world = choose_transport(groups, device, groups.timeout_s)
        copies = ModelCopies.of(world.exchange(split.ranks, "ranks of a copy of the model"))
        world.ledger.watch.log.part = copies.part_in_words(groups.rank)
        tp = model_parallel = _between(copies.copies, device, plain, world.ledger)
        expert_copies = None
        if split.experts:
            expert_copies = ModelCopies.of(world.exchange(split.copy_ranks, "ranks of a copy of the experts"))
            model_parallel = _between(expert_copies.copies, device, plain, world.ledger)
        dp = expert_dp = _data_parallel(config, device, copies, world.ledger)
        if expert_copies is not None:
            expert_dp = _data_parallel(config, device, expert_copies, world.ledger)
        return cls(
            split=split,
            world_groups=groups,
            world=world,
            dp=dp,
            expert_dp=expert_dp,
            tp=tp,
            model_parallel=model_parallel,
        )

    def group_of(self, parameter: torch.Tensor) -> DataParallelGroup:
        """Returns the ranks with the same part of a parameter; of a buffer, those with all of it."""
        return self.expert_dp if parameter in self.split.experts else self.dp

    def place_of(self, parameter: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """The ranks with the same part of a parameter, and this rank's shard: where both are the same, there are copies.

        All of the ranks: those that share experts may begin with the same rank as those that share the rest.
        """
        groups = self.group_of(parameter).all_groups
        return groups.world.ranks, groups.shard_rank

    @property
    def not_counted(self) -> str:
        """Names the traffic of training that belongs to the model and is in no report; "" without any."""
        if self.split.is_empty:
            return ""
        copies = self.world_groups.world_size // len(self.split.copy_ranks)
        is_alike = copies == self.dp.groups.world_size
        between = f"between the {copies} copies of the model" if is_alike else "of state and gradients"
        return (
            f"These are hf_zero's, {between}. What ranks {list(self.split.copy_ranks)} send each other in forward and backward "
            "as one copy (tensor or expert parallel) is the model's own and not counted."
        )

    @property
    def agreement(self) -> Transport | Agreement:
        """Between the ranks of which each has its share of a step's gradients."""
        if self.split.experts:
            # Ranks that share the experts are not those that share the rest.
            return self.world
        if self.dp.groups.shard_size == 1:
            # Ranks that hold the same part have found the same already.
            return self.model_parallel
        return self.dp.transport if self.split.is_empty else Agreement(self.dp.transport, self.model_parallel)


def _data_parallel(
    config: ZeroConfig, device: torch.device, copies: ModelCopies | None = None, ledger: Ledger | None = None
) -> DataParallelGroup:
    apart = None if copies is None else copies.dp_groups
    groups = Groups.create(stage=config.stage, device_type=device.type, comm=config.comm, apart=apart)
    return choose_group(groups, device, ledger)


def _between(sets: Sequence[Sequence[int]], device: torch.device, comm: CommConfig, ledger: Ledger) -> Transport:
    """Makes a transport between the ranks of each set, for agreements only."""
    groups = Groups.create(stage=1, device_type=device.type, comm=comm, apart=tuple(map(sorted, sets)))
    return choose_transport(groups, device, groups.timeout_s, ledger)
