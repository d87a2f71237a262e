"""Waits for ranks to arrive, names the missing ones, and distinguishes a lost peer from a slow one."""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
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
# others, so a counter in the store contains the processes that have left or ended. A process counts itself when leaving. If it
# ended without doing so, the ranks of its host count it. The store lists the ranks of each host. The counter's name contains the
# name of rank 0's process, because a restarted run may use its predecessor's store.

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
        # Remove entries from groups destroyed by the script; otherwise this rank would look gone to the others.
        if self._store.check(f"left {rank}"):
            self._store.delete(f"left {rank}")
            if (counter := self._counter()) is not None and self._store.check(f"counted {process.name}"):
                self._store.delete(f"counted {process.name}")
                self._store.add(counter, -1)

    def known(self, rank: int) -> RankProcess | None:
        """Returns the process of a rank; None before the rank has registered."""
        if rank not in self._known and self._store.check(f"process {rank}"):
            process = RankProcess(**json.loads(self._store.get(f"process {rank}")))
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
        if process is None or not self._store.check(f"left {rank}"):
            return False
        # Ignore an entry of a predecessor of the rank.
        return self._store.get(f"left {rank}").decode() == process.name

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
            if not self._store.check(f"here {namespace} {number}"):
                break
            self._here[number] = int(self._store.get(f"here {namespace} {number}"))
        for rank in self._here.values():
            process = self.known(rank)
            if process is not None and process.name not in self._counted and process.has_ended():
                self._count(process.name)
        counter = self._counter()
        return counter is not None and self._store.add(counter, 0) >= world_size

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
            pause_s, ranks = _PAUSE_S, range(dist.get_world_size())
            while not processes.all_have_gone(len(ranks)):
                if time.monotonic() >= deadline_s:
                    return [rank for rank in ranks if not processes.has_gone(rank)]
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONG_PAUSE_S)
    except (StoreSilentError, dist.DistNetworkError):
        # The store exists as long as any rank works, so without a store its owner has left.
        return []
    return []


# ---- A barrier before each process group ----
#
# torch's `new_group` waits in the store for the addresses of all ranks, for as long as the group's collectives may take (half an
# hour by default), and a store does not report a dead rank. After this barrier, all ranks are known to be alive.
#
# [Note: a call and its answers] torchrun may restart ranks with the store of their predecessors, so an entry in the store alone
# does not prove that a rank has arrived. Rank 0 calls under a new name. The others answer this call with a name of their own, and
# rank 0's last word contains all of these names. If a rank's name is missing, the word belongs to an earlier call, and the rank
# continues to wait.

_LOOK_S = 0.5
NOTICES_S = (10.0, 60.0, 300.0, 1200.0)
"""After each of these times, the missing ranks are printed."""
_WORD_S = 10.0
"""Additional time for rank 0's last word, after its time limit."""


def await_all_ranks(timeout_s: float, number: int) -> None:
    """Waits for every rank of the default group, before a process group is made. Collective.

    Args:
        timeout_s: time limit for a rank.
        number: the same on all ranks, and different for each call.

    Raises:
        CommunicationError: `timeout_s` have passed, or a rank has ended or left without arriving. The error names the rank.
    """
    try:
        with opened_store(max(timeout_s, CALL_S)) as store:
            # Register first: a rank waiting for this one looks up its process to find out whether this rank is alive.
            RankProcesses(store).register()
            (_Caller if dist.get_rank() == 0 else _Answerer)(store, timeout_s, number).hold()
    except StoreSilentError as error:
        raise CommunicationError(
            f"hf_zero: ranks that make process groups cannot reach their store: {error}. Look at that process and its host."
        ) from error
    except dist.DistNetworkError as error:
        raise CommunicationError(
            "hf_zero: ranks that make process groups have lost their store: the process that keeps it, rank 0's or the "
            "launcher's, has ended. Its own error is the reason."
        ) from error


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


class _Barrier:
    """Waits until all ranks have arrived; see [Note: a call and its answers]."""

    def __init__(self, store: Keys, timeout_s: float, number: int):
        self._processes = RankProcesses(store)
        self._timeout_s = timeout_s
        self._store = store.below(f"hf_zero/arrivals/{number}")
        self._name = uuid.uuid4().hex
        self._began_s = time.monotonic()
        self._look_s = _LOOK_S
        self._notices_s = list(NOTICES_S)

    def hold(self) -> None:
        pause_s = 1e-3
        while not self._is_over():
            if self._waited_s >= min(self._look_s, self._timeout_s):
                self._look_s = self._waited_s + _LOOK_S
                self._look()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def _is_over(self) -> bool:
        """Whether all ranks have arrived, as far as this rank needs to know."""
        raise NotImplementedError

    def _look(self) -> None:
        """Raises if further waiting is useless."""
        raise NotImplementedError

    def _notice(self, missing: Sequence[int]) -> None:
        if self._notices_s and self._waited_s >= self._notices_s[0]:
            self._notices_s.pop(0)
            who, seconds = in_words(missing), f"{self._waited_s:.0f} s"
            said = f"hf_zero: process groups are made once all ranks are here; waited {seconds} for {who}."
            print(said, file=sys.stderr, flush=True)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check(key) else None


class _Caller(_Barrier):
    """The barrier on rank 0."""

    def __init__(self, store: Keys, timeout_s: float, number: int):
        super().__init__(store, timeout_s, number)
        self._answers: dict[int, str] = {}
        self._store.set("call", self._name)

    def _is_over(self) -> bool:
        for rank in self._missing():
            call, _, name = (self._read(f"answer {rank}") or "").partition(" ")
            if call == self._name:
                self._answers[rank] = name
        if self._missing():
            return False
        self._say("")
        return True

    def _look(self) -> None:
        missing = self._missing()
        gone = [rank for rank in missing if self._processes.has_gone(rank)]
        if gone:
            self._give_up(_ended(gone), gone)
        if self._waited_s >= self._timeout_s:
            self._give_up(_did_not_come(missing, self._timeout_s), missing)
        self._notice(missing)

    def _give_up(self, why: str, culprits: Sequence[int]) -> None:
        # Publish before raising, because the answering ranks wait for this word, not for this process.
        self._say(why, culprits)
        raise CommunicationError(why, culprits)

    def _say(self, why: str, culprits: Sequence[int] = ()) -> None:
        word = {"names": list(self._answers.values()), "why": why, "culprits": list(culprits)}
        self._store.set("word", json.dumps(word))

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, dist.get_world_size()) if rank not in self._answers]


class _Answerer(_Barrier):
    """The barrier on the other ranks."""

    def __init__(self, store: Keys, timeout_s: float, number: int):
        super().__init__(store, timeout_s, number)
        self._call: str | None = None

    def _is_over(self) -> bool:
        word = json.loads(self._read("word") or "{}")
        if self._name in word.get("names", ()):
            if word["why"]:
                raise CommunicationError(word["why"], word["culprits"])
            return True
        call = self._read("call")
        if call != self._call:
            self._call = call
            # Rank 0 may call long after this rank's arrival, so the time limit starts at the call.
            self._began_s = time.monotonic()
            self._look_s = _LOOK_S
            self._store.set(f"answer {dist.get_rank()}", f"{call} {self._name}")
        return False

    def _look(self) -> None:
        if self._processes.has_gone(0):
            raise CommunicationError(_ended([0]), [0])
        if self._waited_s >= self._timeout_s + _WORD_S * (self._call is not None):
            raise CommunicationError(_did_not_come([0], self._timeout_s), [0])
        # Only rank 1 prints, for all ranks waiting for rank 0.
        if self._call is None and dist.get_rank() == 1:
            self._notice([0])


def _ended(ranks: Sequence[int]) -> str:
    why = f"{in_words(ranks)} ended without coming: look at what was said there last."
    return f"hf_zero: not all ranks came to make process groups. {why}"


def _did_not_come(ranks: Sequence[int], timeout_s: float) -> str:
    return (
        f"hf_zero: not all ranks came to make process groups. {in_words(ranks)} did not come within {timeout_s:.0f} s "
        "(`comm.timeout_s`): look at what is done there before the model is prepared."
    )
