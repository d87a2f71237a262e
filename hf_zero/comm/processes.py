"""Which of the ranks' processes have ended, as far as this host can see."""

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil


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
