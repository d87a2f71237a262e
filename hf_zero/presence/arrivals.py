"""Waits for ranks to arrive, names the missing ones, and distinguishes a lost peer from a slow one."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from .store import CALL_S, Keys, StoreSilentError, opened_store

# ---- Errors of failed collectives, and a way to make unfinished waits fail ----

_TAG = 0x5A4B0000
_AT_ONCE = timedelta(milliseconds=1)


class CommunicationError(RuntimeError):
    """A collective failed. The message names the collective, the culprit, and the state of each rank.

    Attributes:
        culprits: the responsible ranks, if known.
    """

    def __init__(self, message: str, culprits: Sequence[int] = ()):
        super().__init__(message)
        self.culprits = tuple(culprits)


class PeerFailure(RuntimeError):
    """A message from or to one rank failed.

    Attributes:
        rank: the other rank.
    """

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


def break_all_groups() -> None:
    """Makes all running collectives of this process fail. No process group can be used afterwards."""
    for group in list(_world.pg_map):
        # The config is text such as "cpu:gloo,cuda:nccl".
        for each in dist.get_backend_config(group).split(","):
            _break(group._get_backend(torch.device(each.partition(":")[0])), group)


def _break(backend: Any, group: dist.ProcessGroup) -> None:
    # torch's types do not describe the methods of individual backends.
    if backend.name() != "gloo":
        # Run in a thread, because NCCL's abort may wait for its device, which waits for the lost rank.
        threading.Thread(target=backend.abort, name="hf_zero abort", daemon=True).start()
        return
    # gloo's own `abort` does not end running waits. But gloo closes all connections of a group after one wait has timed out.
    other = 1 if group.rank() == 0 else 0
    try:
        group.recv([torch.zeros(1)], other, _TAG).wait(_AT_ONCE)
    except RuntimeError:
        return


# ---- Which of the ranks' processes have ended, are stopped, or have finished ----
#
# [Note: ranks that are started again] torchrun restarts ranks with the store of their predecessors, including all old entries.
# All ranks publish their process as soon as their process group exists, so an entry from before the start of this process
# belongs to a predecessor.
#
# [Note: the end of a run] Finished ranks wait for the others. With thousands of ranks, a finished rank cannot query each of the
# others, so a counter in the store contains the processes that have left or ended. A process counts itself when leaving. A
# process ending without this is counted by the ranks of its host. The store lists the ranks of each host. The counter's name
# contains the name of rank 0's process, because a restarted run may use its predecessor's store.

_PAUSE_S, _LONG_PAUSE_S = 0.02, 0.2


def _pid_namespace() -> str:
    """Names the set of processes in which a pid is unique; a name only of this process if the system has no such set."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return uuid.uuid4().hex
    # Many hosts use the same namespace numbers, so add the boot id. Containers of one host have their own processes.
    return f"{boot.read_text().strip()}/{namespace.stat().st_ino}"


def _since_boot_s() -> float:
    """Reads Linux's clock for the start of a process; 0 on other systems."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


def _began_s() -> float:
    """Returns the start of this process, by the clock of `_since_boot_s`."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    # The fields follow the name of the program, which may contain spaces; see proc(5).
    ticks = stat.read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class RankProcess:
    """Describes the process of one rank to the others.

    Attributes:
        pid: the process id inside of `namespace`.
        began_s, told_s: start of the process, and creation of this description, in seconds since the boot of the host.
    """

    pid: int = field(default_factory=os.getpid)
    namespace: str = field(default_factory=_pid_namespace)
    host: str = field(default_factory=socket.gethostname)
    began_s: float = field(default_factory=_began_s)
    told_s: float = field(default_factory=_since_boot_s)

    @property
    def name(self) -> str:
        """A name of the process, unique over all starts of the run."""
        return f"{self.host} {self.namespace} {self.pid} {self.began_s}"

    def is_of_an_earlier_start(self) -> bool:
        """Whether this entry belongs to a predecessor; see [Note: ranks that are started again]. False for other hosts."""
        return self.namespace == _pid_namespace() and self.told_s < _began_s()

    def has_ended(self) -> bool:
        """Whether the process has ended. False for processes of other hosts and containers, which are invisible from here."""
        # A process whose parent has not collected its status yet is still listed, as a zombie.
        return self._status() in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger stops the process, as far as this host can see."""
        return self._status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def _status(self) -> str | None:
        """Returns the system's status; None without a process."""
        if self.namespace != _pid_namespace():
            return "unknown"
        try:
            return psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return None


class RankProcesses:
    """Knows the processes of all ranks of the default group, through the launcher's store.

    A rank is known after its process has called `register`.
    """

    def __init__(self, store: Keys):
        self._store = store.below("hf_zero/processes")
        self._known: dict[int, RankProcess] = {}
        self._here: dict[int, int] = {}
        self._counted: set[str] = set()

    def register(self) -> None:
        """Publishes this process, also after `leave`, because a script may make its groups again."""
        rank, process = dist.get_rank(), RankProcess()
        self._store.set(f"process {rank}", json.dumps(asdict(process)))
        if self._store.add(f"listed {process.name}", 1) == 1:
            number = self._store.add(f"here {process.namespace}", 1)
            self._store.set(f"here {process.namespace} {number}", str(rank))
        # Clear entries from groups destroyed by the script; otherwise this rank would look gone to the others. Do not delete
        # the key: another rank may just have found the key, and would wait for its value.
        if self._store.find(f"left {rank}"):
            self._store.set(f"left {rank}", "")
            if (counter := self._counter()) is not None and self._store.check(f"counted {process.name}"):
                self._store.delete(f"counted {process.name}")
                self._store.add(counter, -1)

    def known(self, rank: int) -> RankProcess | None:
        """Returns the process of a rank; None before the rank has registered."""
        if rank not in self._known and (found := self._store.find(f"process {rank}")):
            process = RankProcess(**json.loads(found))
            # A predecessor's pid may belong to another process by now, which would count as alive.
            if not process.is_of_an_earlier_start():
                self._known[rank] = process
        return self._known.get(rank)

    def has_gone(self, rank: int) -> bool:
        """Whether a rank has left or, as far as this host can see, ended. The launcher watches other hosts."""
        return self.has_left(rank) or self.has_ended(rank)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has reached the end of its script."""
        process = self.known(rank)
        # The name differs in an entry of a predecessor of the rank.
        return process is not None and self._store.find(f"left {rank}") == process.name

    def has_ended(self, rank: int) -> bool:
        process = self.known(rank)
        return process is not None and process.has_ended()

    def announce_end(self, rank: int | None = None) -> None:
        """Publishes the end of this rank's work.

        Args:
            rank: the rank of this process, which may not be in a process group any more.
        """
        name = RankProcess().name
        self._store.set(f"left {dist.get_rank() if rank is None else rank}", name)
        self._count(name)

    def all_have_gone(self, world_size: int) -> bool:
        """Whether all ranks have left or ended. The cost does not depend on the number of ranks; see [Note: the end of a run]."""
        namespace = _pid_namespace()
        for number in range(len(self._here) + 1, self._store.add(f"here {namespace}", 0) + 1):
            here = self._store.find(f"here {namespace} {number}")
            if here is None:
                break
            self._here[number] = int(here)
        for rank in self._here.values():
            process = self.known(rank)
            if process is not None and process.name not in self._counted and process.has_ended():
                self._count(process.name)
        counter = self._counter()
        return counter is not None and self._store.add(counter, 0) >= world_size

    def unfinished(
        self, world_size: int, deadline_s: float, is_missed: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """Waits for all ranks to leave or end; returns the others after the deadline, or once `is_missed` returns True."""
        pause_s = _PAUSE_S
        while not self.all_have_gone(world_size):
            if time.monotonic() >= deadline_s or is_missed():
                return [rank for rank in range(world_size) if not self.has_gone(rank)]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONG_PAUSE_S)
        return []

    def _count(self, name: str) -> None:
        """Counts a process as left or ended, unless already counted."""
        counter = self._counter()
        if counter is not None:
            self._counted.add(name)
            if self._store.add(f"counted {name}", 1) == 1:
                self._store.add(counter, 1)

    def _counter(self) -> str | None:
        """Names the counter of gone processes; None before rank 0 has registered."""
        first = self.known(0)
        return None if first is None else f"gone with {first.name}"


def register_process() -> None:
    """Publishes this rank's process.

    Raises:
        CommunicationError: the store does not answer.
    """
    try:
        with opened_store(CALL_S) as store:
            RankProcesses(store).register()
    except StoreSilentError as error:
        raise CommunicationError(f"hf_zero: {error}. Look at that process and its host.") from error


def leave_together(patience_s: float) -> list[int]:
    """Publishes the end of this rank's work, and waits for the others; returns the unfinished ones after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    try:
        with opened_store(CALL_S) as store:
            processes = RankProcesses(store)
            processes.announce_end()
            return processes.unfinished(dist.get_world_size(), deadline_s)
    except (StoreSilentError, dist.DistNetworkError):
        # The store exists as long as any rank works, so without a store its owner has left.
        return []


def ended_ranks(ranks: Sequence[int]) -> list[int]:
    """Returns the ranks whose processes have ended or left, as far as this host can see."""
    try:
        with opened_store(CALL_S) as store:
            processes = RankProcesses(store)
            return [rank for rank in ranks if processes.has_gone(rank)]
    except (StoreSilentError, dist.DistNetworkError):
        return []


def in_words(ranks: Sequence[int], most: int | None = None) -> str:
    """Formats ranks: `rank 1`, `ranks 1, 2`, or for more than `most` ranks `ranks 1, 2 and 3 more`."""
    more = f" and {len(ranks) - most} more" if most is not None and len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:most]))}{more}"
