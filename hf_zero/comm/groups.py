"""Shard groups, replicate groups and nodes, and their communicators.

[Note: two communicators] A communicator of NCCL runs its collectives one after the other, in the same order on all ranks. At
stage 3, a layer's gather would therefore wait for the gradients of the layers before, and forward and backward wait for the
gather, while nothing waits for the gradients until backward ends. Also, gathers follow the order of forward and backward, but
reductions follow the order of buckets. Below stage 3, a broadcast of buffers before a forward would wait for all gathers after
the step. So on an accelerator the parameters' all-gathers have their own communicator, with a stream of high priority: if
backward's kernels occupy all multiprocessors, a ready collective runs before the kernels that have not started yet. gloo's
messages have no such order, and a second group brought no gain there, so all messages use one group.

Two communicators may deadlock: one rank runs a collective of the first and has no multiprocessors left for the second, while
its peer does the opposite. NCCL 2.26 and later keep the host's launch order, which is the same on all ranks, if
NCCL_LAUNCH_ORDER_IMPLICIT is 1. NCCL reads the variable once, with the first communicator of the process. `import hf_zero` sets
the variable, unless the environment has another value or NCCL may already have run. Without the variable, all collectives share
one communicator.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist

from ..config import AUTO, CommConfig, ConfigError
from .own_groups import own_group

_USUAL_LIMIT_S = 1800.0
"""torch's own default, for backends that do not report their limit."""

_LATE_S, _LATE_ON_ACCELERATORS_S = 120.0, 600.0


def with_time_limits(comm: CommConfig, device_type: str) -> CommConfig:
    """Returns the settings with `timeout_s` in seconds, by default the default group's limit, and `late_s` at most as long."""
    timeout_s = _own_limit_s(device_type) if comm.timeout_s == AUTO else float(comm.timeout_s)
    usual = _LATE_S if device_type in ("cpu", "meta") else _LATE_ON_ACCELERATORS_S
    late_s = usual if comm.late_s == AUTO else float(comm.late_s)
    return replace(comm, timeout_s=timeout_s, late_s=min(late_s, timeout_s))


def _own_limit_s(device_type: str) -> float:
    if not (dist.is_available() and dist.is_initialized()):
        return _USUAL_LIMIT_S
    group, device = cast(dist.ProcessGroup, dist.group.WORLD), torch.device(device_type)
    try:
        return group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        # A plan uses models on the meta device, for which the group has no backend. Backends from outside of torch may have no
        # options: torch 2.14 raises for them, older releases return None or have no attribute.
        return _USUAL_LIMIT_S


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks of the same collectives.

    Attributes:
        ranks: in the order of their parts.
        index: index of this rank among them.
        handle: their process group; None for a group of one rank, which sends nothing.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def peers(self) -> list[int]:
        """Lists the indices of the others."""
        return [each for each in range(self.size) if each != self.index]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The ranks of one engine.

    The ranks of a shard group together hold one copy of the sharded state. The ranks of a replicate group hold the same shard. At
    stage 0, each shard group is one rank, and the replicate group contains all ranks. At stages 1 to 3, the shard group contains
    all ranks, unless `comm.shard_group_size` makes several shard groups of neighboring ranks. If the model itself is split over
    ranks (tensor or expert parallel), all of these groups only contain ranks with the same part of the model. With
    `comm.sync_every`, the shard groups step independently most of the time: each replicate group is then a single rank, and
    `outer` contains the ranks of the original replicate group.

    Attributes:
        timeout_s: time limit for a rank.
        late_s: time after which a rank is late and all ranks are ended; 0 means never.
        backend: name of the data backend; "local" for one rank without a process group.
        world: all ranks that train the model (or the same part of a split model), in order.
        shard, replicate: this rank's groups.
        gather: the shard group for the parameter all-gathers, with its own communicator if that is faster; see [Note: two
            communicators].
        control: gloo group for small agreements between hosts, which do not stop a device's queue. If all collectives use gloo,
            this is also the group of the world.
        nodes: the node of each rank of the run.
        node: the ranks of the shard group on this rank's node; None if no setting needs them.
        outer: the ranks with the same shard of models that are only combined in outer steps; None without outer steps.
        shard_control: like `control`, for the shard group.
    """

    backend: str
    world: RankGroup
    shard: RankGroup
    replicate: RankGroup
    gather: RankGroup
    control: dist.ProcessGroup | None = None
    nodes: tuple[int, ...] = (0,)
    node: RankGroup | None = None
    outer: RankGroup | None = None
    shard_control: dist.ProcessGroup | None = None
    timeout_s: float = _USUAL_LIMIT_S
    late_s: float = 0.0

    @property
    def control_group(self) -> dist.ProcessGroup:
        """Returns `control`, which exists in groups of several ranks."""
        if self.control is None:
            raise AssertionError(
                f"hf_zero: bug: ranks of the backend {self.backend} have no control group. Open an issue with this "
                "traceback."
            )
        return self.control

    @classmethod
    def create(
        cls, *, stage: int, device_type: str, comm: CommConfig, separate: Sequence[Sequence[int]] | None = None
    ) -> "Groups":
        """Makes the groups of this process, with the time limit `comm.timeout_s`. Collective: every rank calls it.

        With a world size of 1, no process group is needed.

        Args:
            separate: sets of ranks that get separate groups, in ascending order and of equal size; by default all ranks form one
                set.

        Raises:
            ConfigError: `comm.shard_group_size` does not divide the ranks, or leaves only one group for `comm.sync_every`; or the
                launcher has started several processes, but there is no process group.
        """
        comm = with_time_limits(comm, device_type)
        if not (dist.is_available() and dist.is_initialized()):
            _refuse_ranks_without_group()
            return cls._of_one(0, comm, nodes=(0,))
        if dist.get_world_size() == 1:
            return cls._of_one(0, comm, nodes=(0,))
        rank, everyone = dist.get_rank(), range(dist.get_world_size())
        timeout = timedelta(seconds=comm.limit_s)
        backend = _backend_for(device_type)
        has_queue = backend not in ("gloo", "fake")
        # An accelerator's groups also support host tensors if the default group does.
        kind = "gloo" if backend == "gloo" else None
        # Make this group first, for all ranks, because the names of nodes are exchanged through the group below.
        control = None if backend == "fake" else own_group([tuple(everyone)], timeout, "gloo")
        nodes = _nodes(comm, len(everyone), control)
        sets: Sequence[Sequence[int]] = [everyone] if separate is None else separate
        world_size = len(sets[0])
        if world_size == 1:
            return cls._of_one(rank, comm, nodes=nodes)
        if separate is not None and backend != "fake":
            control = _make(sets, rank, timeout, "gloo").handle
        size = _shard_size(stage, comm, [nodes[each] for each in sets[0]])
        shards = [ranks[start : start + size] for ranks in sets for start in range(0, world_size, size)]
        world = _make(sets, rank, timeout, kind)
        shard = gather = _make(shards, rank, timeout, kind)
        replicate = _make([ranks[start::size] for ranks in sets for start in range(size)], rank, timeout, kind)
        # Use a second communicator only if launch order is kept; otherwise the two may wait for each other.
        if has_queue and stage > 0 and (backend != "nccl" or keeps_launch_order()):
            gather = _make(shards, rank, timeout, backend, is_urgent=True)
        outer, shard_control = None, control
        if comm.sync_every > 1:
            outer, replicate = replicate, RankGroup(ranks=(rank,), index=0)
            shard_control = _make(shards, rank, timeout, "gloo").handle if has_queue else shard.handle
        node = None
        if comm.secondary_shard == "node":
            node = _make(_within_nodes(shards, nodes), rank, timeout, backend, is_urgent=True)
        return cls(
            backend=backend,
            world=world,
            shard=shard,
            replicate=replicate,
            gather=gather,
            control=control,
            nodes=nodes,
            node=node,
            outer=outer,
            shard_control=shard_control,
            timeout_s=comm.limit_s,
            late_s=float(comm.late_s),
        )

    @classmethod
    def _of_one(cls, rank: int, comm: CommConfig, *, nodes: tuple[int, ...]) -> "Groups":
        """Describes a rank without other ranks."""
        alone = RankGroup(ranks=(rank,), index=0)
        return cls(
            backend="local",
            world=alone,
            shard=alone,
            replicate=alone,
            gather=alone,
            nodes=nodes,
            timeout_s=comm.limit_s,
            late_s=float(comm.late_s),
        )

    def of_a_step(self) -> "Groups":
        """Returns the ranks of a common step, as if there were no other ranks."""
        if self.outer is None:
            return self
        return replace(
            self,
            backend=self.backend if self.shard.size > 1 else "local",
            world=self.shard,
            control=self.shard_control,
            outer=None,
        )

    @property
    def is_first_of_run(self) -> bool:
        """Whether this rank prints for the run."""
        return self.world.ranks[self.world.index] == 0

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def rank(self) -> int:
        return self.world.index

    @cached_property
    def shard_size(self) -> int:
        return self.shard.size

    @property
    def shard_rank(self) -> int:
        return self.shard.index

    def peers_elsewhere(self, group: RankGroup) -> int:
        """Counts the ranks of a group on other nodes."""
        here = self.nodes[group.ranks[group.index]]
        return sum(self.nodes[rank] != here for rank in group.ranks)


_LAUNCHED_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers set the number of processes: torchrun, MPI, and srun. If WORLD_SIZE is set, its value counts, so
WORLD_SIZE=1 turns processes started together by srun or mpirun into independent runs."""


def launched_ranks() -> tuple[str, int]:
    """Returns the variable and the number of the launcher's processes; ("", 1) without a launcher."""
    found = ((name, os.environ.get(name, "")) for name in _LAUNCHED_RANKS)
    return next(((name, int(value)) for name, value in found if value.isdigit()), ("", 1))


def _refuse_ranks_without_group() -> None:
    """Raises `ConfigError` for one of several launched processes if there is no process group, as DDP does."""
    variable, ranks = launched_ranks()
    if ranks > 1:
        raise ConfigError(
            f"hf_zero: {variable} is {ranks} and torch.distributed has no process group, so each process would train its own "
            "model. Call torch.distributed.init_process_group() first; for independent runs, set WORLD_SIZE=1."
        )


def keeps_launch_order() -> bool:
    """Whether NCCL runs the collectives of several communicators in the host's order; see [Note: two communicators]."""
    return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"


def _shard_size(stage: int, comm: CommConfig, nodes: Sequence[int]) -> int:
    if stage == 0:
        return 1
    world_size, size, least = len(nodes), comm.shard_group_size, 2
    if size == AUTO:
        size = world_size
        if comm.sync_every > 1:
            # Links inside a node are fast. With a single node, all ranks are equally near.
            size = nodes.count(nodes[0]) if len(set(nodes)) > 1 else 1
    most = world_size
    if comm.sync_every > 1:
        least, most = 1, world_size - 1
    fitting = [n for n in range(least, most + 1) if world_size % n == 0]
    if size not in fitting:
        wrong = f"does not divide the {world_size} ranks of this run"
        if world_size % size == 0:
            wrong = f"makes one group of the {world_size} ranks of this run, but `comm.sync_every` needs several groups"
        raise ConfigError(
            f"hf_zero config: `comm.shard_group_size` is {size}, which {wrong}; allowed: {', '.join(map(str, fitting))}, auto."
        )
    return size


def _within_nodes(shards: Sequence[Sequence[int]], nodes: Sequence[int]) -> list[list[int]]:
    """Lists the ranks of each shard group on each of its nodes.

    Raises:
        ConfigError: there is only one node, or one rank per node, or nodes have different numbers of ranks.
    """
    found = [
        [rank for rank in shard if nodes[rank] == node]
        for shard in shards
        for node in dict.fromkeys(nodes[rank] for rank in shard)
    ]
    sizes = {len(ranks) for ranks in found}
    if len(sizes) > 1 or 1 in sizes or len(found) == len(shards):
        raise ConfigError(
            "hf_zero config: `comm.secondary_shard: node` needs several nodes with the same number of ranks, two or more; the "
            f"nodes of a shard group have {', '.join(str(len(ranks)) for ranks in found)}. Set `comm.node_size`, or leave the "
            "setting at none."
        )
    return found


def _make(
    groups: Sequence[Sequence[int]],
    rank: int,
    timeout: timedelta,
    backend: str | None,
    *,
    is_urgent: bool = False,
) -> RankGroup:
    """Makes the group of this rank. `groups` must contain each rank exactly once. Collective.

    Args:
        backend: None means the backend of the default group.
        is_urgent: on an accelerator, the group's collectives run before kernels that wait for multiprocessors.
    """
    everyone = [tuple(each) for each in groups]
    own = next((each for each in everyone if rank in each), None)
    if own is None:
        raise AssertionError(
            f"hf_zero: bug: rank {rank} is in none of the groups {groups}. Open an issue with this traceback."
        )
    is_alone = all(len(each) == 1 for each in everyone)
    handle = None if is_alone else own_group(everyone, timeout, backend, is_urgent=is_urgent)
    return RankGroup(ranks=own, index=own.index(rank), handle=handle)


def _nodes(comm: CommConfig, world_size: int, control: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Returns the node of each rank, from the config, else from the launcher's numbers, else from host names."""
    if comm.node_size != AUTO:
        return tuple(each // comm.node_size for each in range(world_size))
    if dist.get_backend() == "fake":
        return tuple(each // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) for each in range(world_size))
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, os.environ.get("GROUP_RANK") or socket.gethostname(), group=control)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _backend_for(device_type: str) -> str:
    # A group made with "cpu:gloo,cuda:nccl" has one backend per device type; with "gloo", all device types have the same.
    config = dist.get_backend_config()
    pairs = dict(part.split(":") for part in str(config).split(",") if ":" in part)
    return pairs.get(device_type, dist.get_backend())
