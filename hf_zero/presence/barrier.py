"""A barrier of ranks through the launcher's store, with a time limit: missing ranks are named, and no process group is used."""

import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence

import torch.distributed as dist

from .arrivals import CommunicationError, RankProcesses, in_words
from .store import CALL_S, Keys, StoreSilentError, opened_store

# [Note: a barrier through the store] In gloo's monitored barrier, only rank 0 has a time limit. A timeout also closes the
# connections of the group. This barrier uses the store instead. The first rank publishes the name of a new call. Each other
# rank increments a counter of this name. The first rank reads the counter until all other ranks are counted. In between, the
# first rank checks the processes of missing ranks, because a store does not report dead ranks. At the end, the first rank
# publishes one word for all ranks: an empty text or the reason to give up. The other ranks wait for this word and check only
# the first rank's process. So the number of requests of a rank does not depend on the number of ranks.
#
# torchrun may restart ranks with the store of their predecessors, so an entry in the store alone does not prove an arrival. If a
# call already has a word when a rank first sees it, the call is an earlier one, and the rank waits for a new call.

_PAUSE_S = 0.02
_LOOK_S = 0.5
NOTICES_S = (10.0, 60.0, 300.0, 1200.0)
"""After each of these times, the missing ranks are printed."""
_WORD_S = 10.0
"""Additional time for the first rank's word, after its time limit."""

Judge = Callable[[list[int], list[int], bool], CommunicationError | None]
"""Returns the error of giving up, if any: from the missing ranks, the ended ones of them, and whether the time is over."""


class Barrier:
    """Waits until all of some ranks have arrived; see [Note: a barrier through the store].

    Args:
        ranks: the first one looks for the missing ranks.
        name: the same on all ranks.
        is_unique: no other barrier has this name, also in the store of restarted ranks.
    """

    def __init__(self, store: Keys, ranks: Sequence[int], name: str, *, is_unique: bool):
        self._processes = RankProcesses(store)
        self._store = store.below(f"hf_zero/barrier/{name}")
        self._ranks = ranks
        self._rank = dist.get_rank()
        self.is_first = self._rank == ranks[0]
        self._is_unique = is_unique
        self._call: str | None = None
        self.is_called = self.is_first
        self.began_s = time.monotonic()

    def wait(self, limit_s: float, judge: Judge) -> None:
        """Returns after all ranks have arrived. Raises the error of `judge`, on all ranks if the first rank gives up."""
        if self.is_first:
            self._call = uuid.uuid4().hex
            self._store.set("call", self._call)
        pause_s, look_s = 1e-3, self.began_s + _LOOK_S
        # Poll instead of using the store's own `wait`, which prints warnings on a timeout.
        while not (self._all_have_come() if self.is_first else self._has_word()):
            now_s = time.monotonic()
            is_late = now_s - self.began_s >= limit_s + _WORD_S * (self.is_called and not self.is_first)
            if is_late or now_s >= look_s:
                missing = self._missing()
                error = judge(missing, [rank for rank in missing if self._processes.has_gone(rank)], is_late)
                if missing and error is not None:
                    self._give_up(error)
                    raise error
                look_s = time.monotonic() + _LOOK_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def is_given_up(self) -> bool:
        """Whether another rank has given up this barrier, and waits no longer."""
        return self._store.check("given up")

    def _give_up(self, error: CommunicationError) -> None:
        self._store.set("given up", "")
        if self.is_first:
            self._store.set(f"{self._call} word", json.dumps([str(error), error.culprits]))

    def _missing(self) -> list[int]:
        if not self.is_first:
            return [self._ranks[0]]
        return [rank for rank in self._ranks[1:] if not self._store.check(f"{self._call} came {rank}")]

    def _all_have_come(self) -> bool:
        if self._store.add(f"{self._call} came", 0) < len(self._ranks) - 1:
            return False
        self._store.set(f"{self._call} word", "")
        return True

    def _has_word(self) -> bool:
        # Only a barrier with the name of an earlier one is called again.
        call = self._call if self._is_unique and self._call else self._store.find("call")
        if call != self._call:
            # The first rank may call long after this rank's arrival, so the time limit starts again.
            self._call, self.began_s = call, time.monotonic()
            self.is_called = self._is_unique or not self._store.check(f"{call} word")
            self._store.set(f"{call} came {self._rank}", "")
            self._store.add(f"{call} came", 1)
        word = self._store.find(f"{call} word") if self.is_called else None
        if word:
            raise CommunicationError(*json.loads(word))
        return word is not None


def await_all_ranks(timeout_s: float, number: int) -> None:
    """Waits for every rank of the default group, before a process group is made. Collective.

    torch's `new_group` waits in the store for the addresses of all ranks, for as long as the group's collectives may take (half
    an hour by default). After this barrier, all ranks are known to be alive.

    Args:
        timeout_s: time limit for a rank.
        number: the same on all ranks, and different for each call.

    Raises:
        CommunicationError: `timeout_s` have passed, or a rank has ended or left without arriving. The error names the rank.
    """
    notices_s = list(NOTICES_S)

    def judge(missing: list[int], gone: list[int], is_late: bool) -> CommunicationError | None:
        who, seconds = in_words(gone or missing), time.monotonic() - barrier.began_s
        if gone or is_late:
            late = (
                f"did not arrive within {timeout_s:.0f} s (`comm.timeout_s`): check what runs there before the model is"
            )
            why = "ended before arriving: look at the last output there." if gone else f"{late} prepared."
            return CommunicationError(
                f"hf_zero: not all ranks arrived to create process groups. {who} {why}", gone or missing
            )
        # Only rank 1 prints, for all ranks waiting for rank 0.
        is_teller = barrier.is_first or (dist.get_rank() == 1 and not barrier.is_called)
        if is_teller and notices_s and seconds >= notices_s[0]:
            notices_s.pop(0)
            said = f"hf_zero: process groups are created when all ranks have arrived; waited {seconds:.0f} s for {who}."
            print(said, file=sys.stderr, flush=True)
        return None

    try:
        with opened_store(max(timeout_s, CALL_S)) as store:
            # Register first: a rank waiting for this one looks up its process to find out whether this rank is alive.
            RankProcesses(store).register()
            barrier = Barrier(store, range(dist.get_world_size()), f"group {number}", is_unique=False)
            barrier.wait(timeout_s, judge)
    except StoreSilentError as error:
        raise CommunicationError(
            f"hf_zero: ranks that create process groups cannot reach their store: {error}. Look at that process and its host."
        ) from error
    except dist.DistNetworkError as error:
        raise CommunicationError(
            "hf_zero: ranks that create process groups lost their store: the process that hosts it (rank 0 or the launcher) "
            "has ended. Its own error is the reason."
        ) from error
