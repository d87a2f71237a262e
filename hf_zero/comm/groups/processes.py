"""Which of the ranks' processes have ended, are stopped, or have come to their end.

[Note: ranks that are started again]
torchrun restarts ranks with the store that their predecessors had, and what those have told of themselves is still in it. All
ranks tell it once their process group is there, so what was told before this process began is of a predecessor.
"""

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PAUSE_S = 0.02


def _pid_namespace() -> str:
    """Names the set of processes in which a number means the same process; a name of its own where the system has none."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return uuid.uuid4().hex
    # The number of a namespace is the same on many hosts, and containers of one host have their own processes.
    return f"{boot.read_text().strip()}/{namespace.stat().st_ino}"


def _since_boot_s() -> float:
    """The clock by which Linux says when a process began; 0 on systems that have none."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


def _began_s() -> float:
    """When this process began, by that clock."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    # Behind the name of the program, which may hold spaces; see proc(5).
    ticks = stat.read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank, as others know it.

    Attributes:
        pid: inside of `namespace`.
        began_s, told_s: when it began, and when it made this, in seconds since its host has booted.
    """

    pid: int = field(default_factory=os.getpid)
    namespace: str = field(default_factory=_pid_namespace)
    host: str = field(default_factory=socket.gethostname)
    began_s: float = field(default_factory=_began_s)
    told_s: float = field(default_factory=_since_boot_s)

    @property
    def name(self) -> str:
        """That no other process has, of any start of the run."""
        return f"{self.host} {self.namespace} {self.pid} {self.began_s}"

    def is_of_an_earlier_start(self) -> bool:
        """See [Note: ranks that are started again]; False of processes that cannot be seen from here."""
        return self.namespace == _pid_namespace() and self.told_s < _began_s()

    def has_ended(self) -> bool:
        """False of processes that cannot be seen from here: of other hosts, or of other containers."""
        # A process that its parent has not taken note of is still listed.
        return self._status() in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it, as far as can be seen from here."""
        return self._status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def _status(self) -> str | None:
        """Of the system; None of a process that is not there."""
        if self.namespace != _pid_namespace():
            return "unknown"
        try:
            return psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return None


class RankProcesses:
    """The processes of all ranks of the default group, by way of the store they were launched with.

    A rank is known from when its process has called `register`.

    Args:
        store: a connection to it; by default torch's own.
    """

    def __init__(self, store: dist.Store | None = None):
        self._store = dist.PrefixStore("hf_zero/processes", store or _get_default_store())
        self._known: dict[int, RankProcess] = {}

    def register(self) -> None:
        """Tells the others of this process, which goes on if it had left before: a script may make its groups anew."""
        rank = dist.get_rank()
        self._store.set(f"process {rank}", json.dumps(asdict(RankProcess())))
        if self._store.check([f"left {rank}"]):
            self._store.delete_key(f"left {rank}")

    def known(self, rank: int) -> RankProcess | None:
        """The process of a rank; None where it has told nothing yet."""
        if rank not in self._known and self._store.check([f"process {rank}"]):
            process = RankProcess(**json.loads(self._store.get(f"process {rank}")))
            if not process.is_of_an_earlier_start():
                self._known[rank] = process
        return self._known.get(rank)

    def has_gone(self, rank: int) -> bool:
        """Whether it has left, or has ended as far as can be seen from here; other hosts are their launcher's to watch."""
        return self.has_left(rank) or self.has_ended(rank)

    def has_left(self, rank: int) -> bool:
        """Whether it has come to the end of its script."""
        process = self.known(rank)
        if process is None or not self._store.check([f"left {rank}"]):
            return False
        return self._store.get(f"left {rank}").decode() == process.name

    def has_ended(self, rank: int) -> bool:
        process = self.known(rank)
        return process is not None and process.has_ended()

    def say_that_this_one_leaves(self, rank: int | None = None) -> None:
        """Tells the ranks that wait for this one that it does nothing more with them.

        Args:
            rank: of this process, which need not be in a process group any more.
        """
        self._store.set(f"left {dist.get_rank() if rank is None else rank}", RankProcess().name)

    def leave(self, patience_s: float) -> list[int]:
        """Says so, and waits until the others leave too; returns those that are still at work when `patience_s` have passed."""
        deadline_s = time.monotonic() + patience_s
        try:
            self.say_that_this_one_leaves()
            while at_work := [rank for rank in range(dist.get_world_size()) if not self.has_gone(rank)]:
                if time.monotonic() >= deadline_s:
                    return at_work
                time.sleep(_PAUSE_S)
        except dist.DistNetworkError:
            # The store is kept for as long as anyone works: whoever keeps it has left.
            return []
        return []
