"""Which of the ranks' processes have ended, and which have come to their end."""

import json
import os
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


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank, as others know it."""

    pid: int = field(default_factory=os.getpid)
    namespace: str = field(default_factory=_pid_namespace)

    def has_ended(self) -> bool:
        """False of processes that cannot be seen from here: of other hosts, or of other containers."""
        if self.namespace != _pid_namespace():
            return False
        try:
            # A process that its parent has not taken note of is still listed.
            return psutil.Process(self.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True


class RankProcesses:
    """The processes of all ranks of the default group, by way of the store they were launched with.

    A rank is known from when its process has made one of these.
    """

    def __init__(self) -> None:
        self._store = dist.PrefixStore("hf_zero/processes", _get_default_store())
        self._known: dict[int, RankProcess] = {}
        self._store.set(f"process {dist.get_rank()}", json.dumps(asdict(RankProcess())))

    def has_gone(self, rank: int) -> bool:
        """Whether it has left, or has ended as far as can be seen from here; other hosts are their launcher's to watch."""
        return self._store.check([f"left {rank}"]) or self._has_ended(rank)

    def leave(self, patience_s: float) -> list[int]:
        """Tells the ranks that wait for this one that it does nothing more with them, and waits until they leave too.

        Returns the ranks that are still at work when `patience_s` have passed.
        """
        deadline_s = time.monotonic() + patience_s
        try:
            self._store.set(f"left {dist.get_rank()}", "")
            while at_work := [rank for rank in range(dist.get_world_size()) if not self.has_gone(rank)]:
                if time.monotonic() >= deadline_s:
                    return at_work
                time.sleep(_PAUSE_S)
        except dist.DistNetworkError:
            # The store is kept for as long as anyone works: whoever keeps it has left.
            return []
        return []

    def _has_ended(self, rank: int) -> bool:
        if rank not in self._known:
            if not self._store.check([f"process {rank}"]):
                return False
            self._known[rank] = RankProcess(**json.loads(self._store.get(f"process {rank}")))
        return self._known[rank].has_ended()
