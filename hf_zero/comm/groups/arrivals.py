"""Ranks come together before they make process groups, so that none of them waits there for one that has ended.

torch's `new_group` waits in the store for the addresses of all ranks for as long as the group's collectives may take, half an
hour by default, and a store does not tell that a rank has died.
"""

import sys
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .failures import CommunicationError
from .processes import RankProcesses

_PAUSE_S = 0.02
_LOOK_S = 0.5
_NOTICES_S = (10.0, 60.0, 300.0, 1200.0)
"""After so long a wait, it is said who is waited for."""


def await_all_ranks(timeout_s: float) -> None:
    """Returns once every rank of the default group is here, to make process groups. Collective.

    Raises:
        CommunicationError: `timeout_s` have passed, or a rank has ended or left without coming; names it.
    """
    processes = RankProcesses()
    processes.register()
    try:
        _Arrivals(processes).await_all(timeout_s)
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


class _Arrivals:
    """One meeting of all ranks. Nobody comes to the next one before this one is complete, so a single count numbers them."""

    def __init__(self, processes: RankProcesses):
        self._processes = processes
        self._store = dist.PrefixStore("hf_zero/arrivals", _get_default_store())
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        arrived = self._store.add("arrived", 1)
        self._number = (arrived - 1) // self._world_size
        self._store.set(f"{self._number} came {self._rank}", "")
        if arrived == (self._number + 1) * self._world_size:
            self._store.set(f"{self._number} complete", "")

    def await_all(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        pause_s, look_s, notices_s = 1e-3, _LOOK_S, list(_NOTICES_S)
        while not self._is_complete():
            waited_s = time.monotonic() - began_s
            if waited_s >= min(look_s, timeout_s):
                look_s = waited_s + _LOOK_S
                missing = self._missing()
                self._refuse_to_wait_in_vain(missing, waited_s, timeout_s)
                if notices_s and waited_s >= notices_s[0]:
                    notices_s.pop(0)
                    self._say_who_is_waited_for(missing, waited_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _is_complete(self) -> bool:
        if self._store.check(["given up"]):
            # Before the question whether all are here: one that comes too late is the last one.
            raise CommunicationError(self._store.get("given up").decode())
        return self._store.check([f"{self._number} complete"])

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([f"{self._number} came {rank}"])]

    def _refuse_to_wait_in_vain(self, missing: Sequence[int], waited_s: float, timeout_s: float) -> None:
        gone = [rank for rank in missing if self._processes.has_gone(rank)]
        if gone:
            self._give_up(f"{in_words(gone)} ended before that: look at the error there.", gone)
        if missing and waited_s >= timeout_s:
            self._give_up(
                f"{in_words(missing)} did not come within {timeout_s:.0f} s (`comm.timeout_s`): look at what is done there "
                "before the model is prepared.",
                missing,
            )

    def _give_up(self, why: str, culprits: Sequence[int]) -> None:
        error = CommunicationError(f"hf_zero: only some ranks came to make process groups. {why}", culprits)
        self._store.set("given up", str(error))
        raise error

    def _say_who_is_waited_for(self, missing: Sequence[int], waited_s: float) -> None:
        """On the first of the ranks that wait."""
        if missing and self._rank == next(rank for rank in range(self._world_size) if rank not in missing):
            said = f"hf_zero: process groups are made once all ranks are here; waited {waited_s:.0f} s for {in_words(missing)}."
            print(said, file=sys.stderr, flush=True)


def in_words(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
