"""Ranks come together before they make a process group, so that none of them waits there for one that has ended.

torch's `new_group` waits in the store for the addresses of all ranks for as long as the group's collectives may take, half an
hour by default, and a store does not tell that a rank has died.

[Note: a call and its answers]
torchrun may start ranks again with the store that their predecessors had, so nothing that lies in it says by itself that a rank
is here. Rank 0 calls under a name that nobody has used, the others answer that call by a name of their own, and rank 0's last
word holds their names. Who does not find its own name in a word waits on: it is that of an earlier call.
"""

import json
import sys
import time
import uuid
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .failures import CommunicationError
from .processes import RankProcesses

_PAUSE_S = 0.02
_LOOK_S = 0.5
_NOTICES_S = (10.0, 60.0, 300.0, 1200.0)
"""After so long a wait, it is said who is waited for."""
_WORD_S = 10.0
"""What rank 0's last word may take beyond its time limit."""


def await_all_ranks(timeout_s: float, number: int) -> None:
    """Returns once every rank of the default group is here, to make a process group. Collective.

    Args:
        timeout_s: how long a rank is waited for.
        number: the same on all ranks, and another one each time.

    Raises:
        CommunicationError: `timeout_s` have passed, or a rank has ended or left without coming; names it.
    """
    processes = RankProcesses()
    processes.register()
    meeting = (_Caller if dist.get_rank() == 0 else _Answerer)(processes, timeout_s, number)
    try:
        meeting.hold()
    except dist.DistNetworkError as error:
        raise CommunicationError(
            "hf_zero: ranks that make process groups have lost their store: the process that keeps it, rank 0's or the "
            "launcher's, has ended. Its own error is the reason."
        ) from error


def ended_ranks(ranks: Sequence[int]) -> list[int]:
    """Those whose processes have ended or left, as far as can be seen from here."""
    processes = RankProcesses()
    try:
        return [rank for rank in ranks if processes.has_gone(rank)]
    except dist.DistNetworkError:
        return []


def in_words(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class _Meeting:
    """What a rank does until all are here; see [Note: a call and its answers]."""

    def __init__(self, processes: RankProcesses, timeout_s: float, number: int):
        self._processes = processes
        self._timeout_s = timeout_s
        self._store = dist.PrefixStore(f"hf_zero/arrivals/{number}", _get_default_store())
        self._name = uuid.uuid4().hex
        self._began_s = time.monotonic()
        self._look_s = _LOOK_S
        self._notices_s = list(_NOTICES_S)

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
        """Whether all ranks are here, as far as this one has to know."""
        raise NotImplementedError

    def _look(self) -> None:
        """Fails where waiting is in vain."""
        raise NotImplementedError

    def _notice(self, missing: Sequence[int]) -> None:
        if self._notices_s and self._waited_s >= self._notices_s[0]:
            self._notices_s.pop(0)
            who, seconds = in_words(missing), f"{self._waited_s:.0f} s"
            said = f"hf_zero: process groups are made once all ranks are here; waited {seconds} for {who}."
            print(said, file=sys.stderr, flush=True)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


class _Caller(_Meeting):
    """Rank 0."""

    def __init__(self, processes: RankProcesses, timeout_s: float, number: int):
        super().__init__(processes, timeout_s, number)
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
        self._say(why, culprits)
        raise CommunicationError(why, culprits)

    def _say(self, why: str, culprits: Sequence[int] = ()) -> None:
        word = {"names": list(self._answers.values()), "why": why, "culprits": list(culprits)}
        self._store.set("word", json.dumps(word))

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, dist.get_world_size()) if rank not in self._answers]


class _Answerer(_Meeting):
    """Any other rank."""

    def __init__(self, processes: RankProcesses, timeout_s: float, number: int):
        super().__init__(processes, timeout_s, number)
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
            self._began_s = time.monotonic()
            self._look_s = _LOOK_S
            self._store.set(f"answer {dist.get_rank()}", f"{call} {self._name}")
        return False

    def _look(self) -> None:
        if self._processes.has_gone(0):
            raise CommunicationError(_ended([0]), [0])
        if self._waited_s >= self._timeout_s + _WORD_S * (self._call is not None):
            raise CommunicationError(_did_not_come([0], self._timeout_s), [0])
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
