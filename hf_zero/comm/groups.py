"""Process groups: the ranks that shard, replicate and gather together, and their communicators."""

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..config import AUTO, CommConfig, ConfigError
from ..hooks.replaced import replaced
from .arrivals import CommunicationError, await_all_ranks, ended_ranks, in_words

# ---- Process groups that only engines use ----
#
# A script's own collectives in the default group, such as a barrier on one rank alone, would mix with the engine's there; and
# the default group has the script's time limit.
#
# [Note: a lock and a core] gloo's thread may not touch a connection while another thread starts a send or receive on it,
# and asks again at once until it may. A message that arrives just then wakes gloo's thread, and where all cores are busy
# the system gives it the core of the very thread that it waits for. It then asks for milliseconds, for a call that takes
# microseconds: with two ranks on two cores that was most of what a small collective cost. A batch thread takes no core from
# a thread that runs. It takes a free one as before, and else has its turn when the other waits or has used up its own.

_MADE: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup | None]]" = (
    weakref.WeakKeyDictionary()
)
"""By the default group that they belong to. torch keeps each group that it ever made, with its connections and threads, until
the default group goes; so engines that are built one after the other take the same ones."""

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_GLOO_THREAD = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")

_MAKING_S, _MAKING_S_A_RANK = 30.0, 0.2
"""What ranks that are all there may take to connect to each other. One that dies just then is waited for that long."""


def own_group(
    groups: Sequence[tuple[int, ...]], timeout: timedelta, backend: str | None = None, *, is_urgent: bool = False
) -> dist.ProcessGroup | None:
    """Makes the one of some groups that this rank is in. Collective: every rank calls it with the same groups, in one order.

    Args:
        groups: hold each rank once.
        backend: None for that of the default group.
        is_urgent: on an accelerator, its collectives go before kernels that wait for room.

    Returns:
        None for a group of one rank.

    Raises:
        CommunicationError: a rank did not come, or ended before it was connected.
    """
    made = _MADE.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
    key = (tuple(groups), timeout, backend, is_urgent)
    if key not in made:
        # `new_group` waits half an hour for a rank that has died. Here all ranks are known to be alive first.
        if dist.get_backend() != "fake":
            await_all_ranks(timeout.total_seconds(), len(made))
        ranks = next(each for each in groups if dist.get_rank() in each)
        options = urgent_options(backend, timeout) if is_urgent else None
        with _in_batch(), _named(f"hf_zero_{len(made)}_of_{ranks[0]}"):
            made[key] = _connected(list(ranks), timeout, backend, options) if len(ranks) > 1 else None
    return made[key]


def _named(name: str) -> AbstractContextManager[None]:
    """Makes torch give the next group this name, which the group's ranks share and no other group has."""
    # A rank makes its own groups only: with 4,096 ranks there may be a thousand others. torch then names a group by its ranks
    # and by how many groups this process has, which may differ between ranks, so that they would wait for each other.
    return replaced(distributed_c10d, "_process_group_name", lambda *_args, **_options: name)


def _connected(ranks: list[int], timeout: timedelta, backend: str | None, options: object | None) -> dist.ProcessGroup:
    """Connects a new group of this rank. gloo's ranks connect inside, and have less time for that than for a collective."""
    limit = timeout
    has_gloo = "gloo" in (backend or str(dist.get_backend_config()))
    if has_gloo:
        limit = min(timeout, timedelta(seconds=_MAKING_S + _MAKING_S_A_RANK * len(ranks)))
    with _reachable() if has_gloo else nullcontext(os.environ.get(_GLOO_INTERFACE)) as interface:
        try:
            group = dist.new_group(ranks, limit, backend, options, use_local_synchronization=True)
            if has_gloo:
                # All ranks go on together. A rank that ends at once, with an error that all ranks raise, would break the
                # connections of ranks that still connect, and they would report that in place of the error.
                dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:
            ended = ended_ranks(ranks)
            why = f"torch says: {error}"
            if ended:
                why = f"{in_words(ended)} ended: look at what was said there last"
            elif has_gloo:
                place = f"interface {interface}" if interface else f"the address of {socket.gethostname()}"
                why = f"gloo listens at {place}; set {_GLOO_INTERFACE} to an interface that other hosts reach. {why}"
            raise CommunicationError(f"hf_zero: {in_words(ranks)} could not connect. {why}", ended) from error
    if limit < timeout:
        # Short while connecting, where a rank may be gone; then the limit of a collective, which may take long.
        set_limit(timeout, group)
    return group


@contextmanager
def _reachable() -> Iterator[str | None]:
    """Makes gloo listen at the interface that reaches the other hosts; yields that, or None for gloo's own choice.

    gloo listens at the address of the host's name. In many containers and clusters the name stands for the loopback address, and
    ranks of other hosts connect in vain, while NCCL finds an interface without the name. GLOO_SOCKET_IFNAME goes first. A default
    group of gloo that has connected by an address beyond the loopback stands, too.
    """
    chosen = os.environ.get(_GLOO_INTERFACE)
    is_connected = "gloo" in str(dist.get_backend_config()) and not _is_loopback(_address_of(socket.gethostname()))
    interface = None if chosen or is_connected else _interface_of_nccl() or _interface_to_master()
    if interface is None:
        yield chosen
        return
    # gloo reads the variable when a group is made, and only then.
    os.environ[_GLOO_INTERFACE] = interface
    try:
        yield interface
    finally:
        # Groups that the script makes keep the choice of torch.
        os.environ.pop(_GLOO_INTERFACE)
        if chosen is not None:
            os.environ[_GLOO_INTERFACE] = chosen


def _interface_of_nccl() -> str | None:
    """The first interface that NCCL_SOCKET_IFNAME names: a list of beginnings, or after "=" of whole names; "^" leaves out."""
    words = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not words or words.startswith("^"):
        return None
    wanted = words.lstrip("=").split(",")
    for name in interfaces():
        if any(name == each if words.startswith("=") else name.startswith(each) for each in wanted):
            return name
    return None


def _interface_to_master() -> str | None:
    """The interface of the route to MASTER_ADDR; where the route is the loopback, the first interface that leaves this host."""
    found = interfaces()
    address = _address_of(os.environ.get("MASTER_ADDR", ""), is_route=True)
    if _is_loopback(address) and os.environ.get("LOCAL_WORLD_SIZE") != str(dist.get_world_size()):
        # As NCCL does: bridges of containers reach no other host.
        bridges = ("docker", "br-", "veth", "virbr")
        beyond = [name for name in found if not name.startswith(bridges)]
        return next((name for name in beyond if not all(map(_is_loopback, found[name]))), None)
    return next((name for name, all_of in found.items() if address in all_of), None)


def interfaces() -> dict[str, list[str]]:
    """Lists the addresses of each interface that is up."""
    up = psutil.net_if_stats()
    return {
        name: [each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def _address_of(host: str, *, is_route: bool = False) -> str | None:
    """Returns the address of a host's name, or this host's address on the route there; None without one."""
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            if not is_route:
                return str(place[0])
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                # Sends nothing: the kernel looks the route up.
                asking.connect(place)
                return str(asking.getsockname()[0])
    except OSError:
        return None
    return None


def _is_loopback(address: str | None) -> bool:
    return address is None or ip_address(address.partition("%")[0]).is_loopback


def urgent_options(backend: str | None, timeout: timedelta) -> object | None:
    """NCCL's options for a stream of high priority; None for other backends, which have none."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # `new_group` warns of any other.
    options._timeout = timeout
    return options


@contextmanager
def _in_batch() -> Iterator[None]:
    """Makes gloo's new threads run as batch threads; see [Note: a lock and a core]. On Linux alone."""
    if not (hasattr(os, "SCHED_BATCH") and _THREADS.is_dir()):
        yield
        return
    # gloo's threads have no handle: those that are new behind `new_group` are this group's.
    before = receiving_threads()
    yield
    for thread in receiving_threads() - before:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except PermissionError:
            # A sandbox may forbid it. Training is the same, and slower where all cores are busy.
            return
        except ProcessLookupError:
            # Its group has gone meanwhile.
            continue


def receiving_threads() -> set[int]:
    """Lists the threads of this process in which gloo receives, by the system's numbers."""
    found = set()
    for each in _THREADS.iterdir():
        try:
            name = (each / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            # A thread that has ended since they were listed.
            continue
        if name == _GLOO_THREAD:
            found.add(int(each.name))
    return found


# ---- Shard groups, replicate groups and nodes ----
#
# [Note: two communicators] A communicator of NCCL takes its collectives one after the other, in one order on all ranks. At
# stage 3 a layer's gather would so wait for the gradients of the layers before it, and forward and backward wait for the
# gather, where nothing waits for the gradients until backward ends; also, gathers follow the order of forward and backward
# and reductions the order of buckets. Below stage 3 a broadcast of buffers before a forward would wait for all gathers
# behind the step. So on an accelerator the parameters' all-gathers have a communicator of their own, with a stream of high
# priority: a collective that has its data, and finds all multiprocessors taken by backward's kernels, goes before the
# kernels that have not begun. gloo's messages have no such order: there a second group has gained nothing, and all go
# through one.
#
# Two communicators may hang where one would not: a rank runs the first's collective and has no room for the second's, and
# its peer the other way round. NCCL 2.26 and later keep to the order in which the host has asked, where
# NCCL_LAUNCH_ORDER_IMPLICIT is 1, and that order is the same on all ranks. NCCL reads the variable once, with the first
# communicator of the process: `import hf_zero` sets the variable, unless the environment has another value or NCCL may have
# run before. Without the variable all collectives share one communicator.

_USUAL_LIMIT_S = 1800.0
"""torch's own default, for backends that do not say theirs."""

_LATE_S, _LATE_ON_ACCELERATORS_S = 120.0, 600.0


def set_limit(limit: timedelta, group: dist.ProcessGroup) -> None:
    """Sets how long a collective of a group may take."""
    # Backends that are not torch's own need not have a limit.
    with suppress(RuntimeError):
        group.set_timeout(limit)


def with_time_limits(comm: CommConfig, device_type: str) -> CommConfig:
    """The settings with `timeout_s` in seconds, by default the default group's own, and a `late_s` that is no longer."""
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
        # A plan is of models on the meta device, for which the group has no backend. Backends that are not torch's own need not
        # have options: torch 2.14 raises there, older ones have None or no attribute.
        return _USUAL_LIMIT_S


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks that take part in the same collectives.

    Attributes:
        ranks: in the order of their parts.
        index: of this rank among them.
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

    The shard group holds one copy of the sharded state between its ranks; the replicate group holds the ranks that own
    the same shard. Stage 0 is a shard group of one rank in a replicate group of all; stages 1 to 3 are a shard group of all,
    unless `comm.shard_group_size` makes several, of neighbouring ranks. Where a model is itself split over ranks (tensor or
    expert parallel), all of these are of the ranks that hold the same part of it. With `comm.sync_every` the shard groups step by
    themselves most of the time: each replicate group is this rank alone then, and `outer` has those that it was made of.

    Attributes:
        timeout_s: how long a rank is waited for.
        late_s: after which a rank is late, and all end for it; 0 is never.
        backend: name of the data backend; "local" for one rank without a process group.
        world: all ranks that train the model, or where it is split over ranks, the same part of it; in order.
        shard, replicate: this rank's groups.
        gather: the shard group for the parameter all-gathers; with a communicator of its own where that pays, see [Note: two
            communicators].
        control: gloo group of the host's small agreements, so that agreeing does not stop a device's queue. Where all goes
            through gloo, it is the group of the world too.
        nodes: the node of each rank of the run.
        node: the ranks of the shard group that are on this rank's node; None where nothing is asked of them.
        outer: the ranks that hold the same shard of models that only outer steps bring together; None where there are none.
        shard_control: as `control`, for the shard group.
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
        """Returns `control`, which groups of several ranks have."""
        if self.control is None:
            raise AssertionError(
                f"hf_zero: bug: ranks of the backend {self.backend} have no control group. Open an issue with this "
                "traceback."
            )
        return self.control

    @classmethod
    def create(
        cls, *, stage: int, device_type: str, comm: CommConfig, apart: Sequence[Sequence[int]] | None = None
    ) -> "Groups":
        """Makes the groups of this process, with `comm.timeout_s` as their limit. Collective: every rank calls it.

        Needs no process group at world size 1.

        Args:
            apart: sets of ranks, in ascending order, as many in each, that have groups of their own; by default all ranks are
                together.

        Raises:
            ConfigError: `comm.shard_group_size` does not divide the ranks, or leaves `comm.sync_every` one group. The launcher
                has started several processes, and there is no process group.
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
        # An accelerator's groups take host tensors too, where the default group does.
        kind = "gloo" if backend == "gloo" else None
        # First, and of all ranks: the node names below are exchanged over it.
        control = None if backend == "fake" else own_group([tuple(everyone)], timeout, "gloo")
        nodes = _nodes(comm, len(everyone), control)
        sets: Sequence[Sequence[int]] = [everyone] if apart is None else apart
        world_size = len(sets[0])
        if world_size == 1:
            return cls._of_one(rank, comm, nodes=nodes)
        if apart is not None and backend != "fake":
            control = _make(sets, rank, timeout, "gloo").handle
        size = _shard_size(stage, comm, [nodes[each] for each in sets[0]])
        shards = [ranks[start : start + size] for ranks in sets for start in range(0, world_size, size)]
        world = _make(sets, rank, timeout, kind)
        shard = gather = _make(shards, rank, timeout, kind)
        replicate = _make([ranks[start::size] for ranks in sets for start in range(size)], rank, timeout, kind)
        # A second communicator only where launch order is kept: else two communicators may wait for each other.
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
        """Describes a rank that shares nothing with others."""
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
        """Returns the ranks that take each step together, as if there were no others."""
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
        """Counts the other ranks of a group on other nodes."""
        here = self.nodes[group.ranks[group.index]]
        return sum(self.nodes[rank] != here for rank in group.ranks)


_LAUNCHED_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers tell each process how many there are: torchrun, MPI's, and srun. WORLD_SIZE decides if it is set,
so that WORLD_SIZE=1 makes independent runs of processes that srun or mpirun starts together."""


def launched_ranks() -> tuple[str, int]:
    """Returns the number of processes that the launcher has started, and the variable with it; ("", 1) without a launcher."""
    found = ((name, os.environ.get(name, "")) for name in _LAUNCHED_RANKS)
    return next(((name, int(value)) for name, value in found if value.isdigit()), ("", 1))


def _refuse_ranks_without_group() -> None:
    """Raises `ConfigError` for one of several launched processes that has no process group, as DDP does."""
    variable, ranks = launched_ranks()
    if ranks > 1:
        raise ConfigError(
            f"hf_zero: {variable} is {ranks} and torch.distributed has no process group, so each process would train a model of "
            "its own. Call torch.distributed.init_process_group() first; for independent runs, set WORLD_SIZE=1."
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
            # Links inside a node are fast; where there is one node only, no two ranks are nearer than others.
            size = nodes.count(nodes[0]) if len(set(nodes)) > 1 else 1
    most = world_size
    if comm.sync_every > 1:
        least, most = 1, world_size - 1
    fitting = [n for n in range(least, most + 1) if world_size % n == 0]
    if size not in fitting:
        wrong = f"does not divide the {world_size} ranks of this run"
        if world_size % size == 0:
            wrong = f"makes one group of the {world_size} ranks of this run, and `comm.sync_every` is of several"
        raise ConfigError(
            f"hf_zero config: `comm.shard_group_size` is {size}, which {wrong}; allowed: {', '.join(map(str, fitting))}, auto."
        )
    return size


def _within_nodes(shards: Sequence[Sequence[int]], nodes: Sequence[int]) -> list[list[int]]:
    """Lists the ranks of each shard group on each of its nodes.

    Raises:
        ConfigError: there is one node or one rank on each, or there are more ranks on one node than on another.
    """
    found = [
        [rank for rank in shard if nodes[rank] == node]
        for shard in shards
        for node in dict.fromkeys(nodes[rank] for rank in shard)
    ]
    sizes = {len(ranks) for ranks in found}
    if len(sizes) > 1 or 1 in sizes or len(found) == len(shards):
        raise ConfigError(
            "hf_zero config: `comm.secondary_shard: node` needs several nodes with equally many ranks, two or more; "
            f"the nodes of a shard group have {', '.join(str(len(ranks)) for ranks in found)}. Set `comm.node_size`, "
            "or leave the setting at none."
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
    """Makes this rank's group, of some groups that hold each rank once. Collective.

    Args:
        backend: None for that of the default group.
        is_urgent: on an accelerator, its collectives go before kernels that wait for room.
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
    """Returns the node of each rank: from the config, else from the launcher's numbers, else from host names."""
    if comm.node_size != AUTO:
        return tuple(each // comm.node_size for each in range(world_size))
    if dist.get_backend() == "fake":
        return tuple(each // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) for each in range(world_size))
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, os.environ.get("GROUP_RANK") or socket.gethostname(), group=control)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _backend_for(device_type: str) -> str:
    # A group made with "cpu:gloo,cuda:nccl" has a backend a device type; one made with "gloo" has that for all.
    config = dist.get_backend_config()
    pairs = dict(part.split(":") for part in str(config).split(",") if ":" in part)
    return pairs.get(device_type, dist.get_backend())
