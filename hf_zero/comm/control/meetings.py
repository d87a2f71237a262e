"""Ranks that wait for each other for a bounded time, without disturbing the process group when some do not come."""

import time

import torch.distributed as dist

from ..groups.failures import CommunicationError
from ..groups.groups import RankGroup
from .lookout import Lookout
from .store_thread import StoreSilentError
from .watch import Wait

_PAUSE_S = 0.02
_LOOK_S = 10.0
_STORE_S = 10.0
"""What a single call to the store may take, and what else its thread has to do meanwhile."""


class Meetings:
    """Meetings of some ranks by way of the store they were launched with.

    gloo's own monitored barrier keeps time on rank 0 alone, and a time limit that passes there closes the connections of
    its group. A store tells nobody that a rank has died, so those that are waited for are looked for.

    Args:
        world: the ranks that meet.
        name: the same on all ranks, and of this transport alone.
    """

    def __init__(self, world: RankGroup, lookout: Lookout, name: str):
        self._ranks = world.ranks
        self._own = self._ranks[world.place]
        self._lookout = lookout
        self._name = name
        self._count = 0

    def meet(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Returns once every rank is here.

        Args:
            alone: what lets one rank do it by itself, for the error.

        Raises:
            CommunicationError: `timeout_s` have passed, a rank has ended or left without coming, or waits for this one in
                another collective; names those that did not come, and where they are.
        """
        self._count += 1
        with self._lookout.inside(purpose) as wait:
            try:
                self._meet(wait, purpose, timeout_s, alone)
            except (dist.DistNetworkError, StoreSilentError) as error:
                silent = str(error) if isinstance(error, StoreSilentError) else None
                what = silent or "the process that keeps the ranks' store has ended, rank 0's or the launcher's"
                raise _came_alone(purpose, what, alone) from error

    def _meet(self, wait: Wait, purpose: str, timeout_s: float, alone: str) -> None:
        if self._lookout.with_store(self._arrive, _STORE_S):
            raise _came_alone(purpose, "the others have given up waiting for this rank", alone)
        pause_s, look_s = 1e-3, _LOOK_S
        while missing := self._lookout.with_store(self._missing, _STORE_S):
            lost = self._lookout.with_store(lambda store: self._lookout.gone(store, missing), _STORE_S)
            if lost or wait.seconds >= timeout_s:
                self._give_up(purpose, missing)
                what = f"ranks {lost} have ended" if lost else f"waited {timeout_s:.0f} s for ranks {missing}"
                raise _came_alone(purpose, what, alone, self._lookout.lines(wait, enough=lost[0] if lost else None))
            if wait.end is not None:
                self._give_up(purpose, missing)
                raise wait.end
            if wait.seconds >= look_s:
                look_s += _LOOK_S
                self._refuse_to_wait_in_vain(purpose, missing, wait, alone)
            # Not by the store's own `wait`: at the end of a patience it prints warnings.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _refuse_to_wait_in_vain(self, purpose: str, missing: list[int], wait: Wait, alone: str) -> None:
        lines = self._lookout.look_for(missing, wait)
        if lines is not None:
            self._give_up(purpose, missing)
            raise _came_alone(purpose, f"ranks {missing} wait for this one elsewhere", alone, lines)

    def _give_up(self, purpose: str, missing: list[int]) -> None:
        def tell(store: dist.Store) -> None:
            self._in(store).set("given up", "")
            self._lookout.keep_words(store, f"only some ranks came to {purpose}", missing)

        self._lookout.with_store(tell, _STORE_S)

    # ---- in the thread of the store ----

    def _arrive(self, store: dist.Store) -> bool:
        """Says that this rank is here; returns whether the others have given up."""
        meeting = self._in(store)
        if meeting.check(["given up"]):
            return True
        meeting.set(f"came {self._own}", "")
        if meeting.add("count", 1) == len(self._ranks):
            meeting.set("complete", "")
        return False

    def _missing(self, store: dist.Store) -> list[int]:
        meeting = self._in(store)
        if meeting.check(["complete"]):
            return []
        return [rank for rank in self._ranks if not meeting.check([f"came {rank}"])]

    def _in(self, store: dist.Store) -> dist.Store:
        return dist.PrefixStore(f"hf_zero/{self._name}/{self._count}", store)


def _came_alone(purpose: str, what: str, alone: str, lines: str = "") -> CommunicationError:
    where, otherwise = f"\n{lines}\n" if lines else " ", f", or {alone}" if alone else ""
    return CommunicationError(
        f"hf_zero: only some ranks came to {purpose}; {what}.{where}It is collective: call it on every rank, outside "
        f"`if is_main_process`{otherwise}. The time limit is `comm.gather_timeout_s`, and of a save_state `comm.timeout_s`."
    )
