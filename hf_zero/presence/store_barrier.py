"""A barrier with a time limit, which leaves the process group usable if some ranks do not arrive."""

import time

import torch.distributed as dist

from ..comm.groups import RankGroup
from ..comm.waits import Wait
from .arrivals import CommunicationError
from .store import CALL_S, Keys, StoreSilentError
from .watchdog import Watchdog

_PAUSE_S = 0.02
_LOOK_S = 10.0


class StoreBarrier:
    """A barrier of some ranks through the launcher's store.

    gloo's own monitored barrier measures time only on rank 0, and a timeout closes the connections of the group.

    Args:
        world: the ranks of the barrier.
        name: the same on all ranks, and unique to this transport.
    """

    def __init__(self, world: RankGroup, watchdog: Watchdog, name: str):
        self._ranks = world.ranks
        self._own = self._ranks[world.index]
        self._watchdog = watchdog
        self._name = name
        self._count = 0

    def wait(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Waits until every rank has arrived.

        Args:
            alone: for the error, how to do the same on one rank only.

        Raises:
            CommunicationError: `timeout_s` have passed, a rank has ended or left without arriving, or a rank waits for this one
                in a different collective. The error names the missing ranks and their state.
        """
        self._count += 1
        with self._watchdog.inside(call_of(purpose)) as wait:
            try:
                self._wait(wait, purpose, timeout_s, alone)
            except (dist.DistNetworkError, StoreSilentError) as error:
                silent = str(error) if isinstance(error, StoreSilentError) else None
                what = silent or "the process that keeps the ranks' store has ended, rank 0's or the launcher's"
                raise _came_alone(purpose, what, alone) from error

    def _wait(self, wait: Wait, purpose: str, timeout_s: float, alone: str) -> None:
        if self._watchdog.with_store(self._arrive, CALL_S):
            raise _came_alone(purpose, "the others have given up waiting for this rank", alone)
        pause_s, look_s = 1e-3, _LOOK_S
        while missing := self._watchdog.with_store(self._missing, CALL_S):
            # A store does not report a dead rank, so look the missing ranks up.
            lost = self._watchdog.with_store(lambda store: self._watchdog.gone(store, missing), CALL_S)
            if lost or wait.seconds >= timeout_s:
                # Give up before raising: a rank arriving later must not wait for this one.
                self._give_up(purpose, missing)
                what = f"ranks {lost} have ended" if lost else f"waited {timeout_s:.0f} s for ranks {missing}"
                raise _came_alone(purpose, what, alone, self._watchdog.lines(wait, enough=lost[0] if lost else None))
            if wait.end is not None:
                self._give_up(purpose, missing)
                raise wait.end
            if wait.seconds >= look_s:
                look_s += _LOOK_S
                self._refuse_to_wait_in_vain(purpose, missing, wait, alone)
            # Poll instead of using the store's own `wait`, which prints warnings on a timeout.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _refuse_to_wait_in_vain(self, purpose: str, missing: list[int], wait: Wait, alone: str) -> None:
        waiting, lines = self._watchdog.look_for(missing, wait)
        if waiting:
            self._give_up(purpose, missing)
            raise _came_alone(purpose, f"ranks {waiting} wait for this one elsewhere", alone, lines)

    def _give_up(self, purpose: str, missing: list[int]) -> None:
        def tell(store: Keys) -> None:
            self._in(store).set("given up", "")
            self._watchdog.write_reason(store, f"only some ranks came to {purpose}", missing)

        self._watchdog.with_store(tell, CALL_S)

    # ---- in the thread of the store ----

    def _arrive(self, store: Keys) -> bool:
        """Registers this rank; returns whether the others have given up."""
        barrier = self._in(store)
        if barrier.check("given up"):
            return True
        barrier.set(f"came {self._own}", "")
        if barrier.add("count", 1) == len(self._ranks):
            barrier.set("complete", "")
        return False

    def _missing(self, store: Keys) -> list[int]:
        barrier = self._in(store)
        # If all ranks have arrived, one query replaces one query per rank.
        if barrier.check("complete"):
            return []
        return [rank for rank in self._ranks if not barrier.check(f"came {rank}")]

    def _in(self, store: Keys) -> Keys:
        return store.below(f"hf_zero/{self._name}/{self._count}")


def call_of(purpose: str) -> str:
    """Names a call of the script as a collective, for messages such as "has waited in the call of full_grad"."""
    return f"call of {purpose}"


def _came_alone(purpose: str, what: str, alone: str, lines: str = "") -> CommunicationError:
    where, otherwise = f"\n{lines}\n" if lines else " ", f", or {alone}" if alone else ""
    return CommunicationError(
        f"hf_zero: only some ranks came to {purpose}; {what}.{where}It is collective: call it on every rank, outside "
        f"`if is_main_process`{otherwise}. The time limit is `comm.late_s`, and of a save_state `comm.timeout_s`."
    )
