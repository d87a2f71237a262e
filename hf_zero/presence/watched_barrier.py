"""A barrier of an engine's ranks, which leaves their process group usable if some ranks do not arrive."""

from collections.abc import Sequence

import torch.distributed as dist

from .arrivals import CommunicationError
from .barrier import Barrier
from .store import StoreSilentError
from .watchdog import Watchdog

_LOOK_S = 10.0
"""Interval at which a rank asks whether the missing ranks wait for this one in another collective."""


def hold_barrier(
    watchdog: Watchdog, ranks: Sequence[int], name: str, purpose: str, limit_s: float, alone: str = ""
) -> None:
    """Waits until every rank has arrived.

    Args:
        name: the same on all ranks, and of no other barrier.
        alone: for the error, how to do the same on one rank only.

    Raises:
        CommunicationError: `limit_s` have passed, a rank has ended or left without arriving, or a rank waits for this one in a
            different collective. The error names the missing ranks and their state.
    """

    def came_alone(what: str, culprits: Sequence[int] = (), lines: str = "") -> CommunicationError:
        where, otherwise = f"\n{lines}\n" if lines else " ", f", or {alone}" if alone else ""
        return CommunicationError(
            f"hf_zero: only some ranks reached {purpose}; {what}.{where}It is collective: call it on every rank, outside `if "
            f"is_main_process`{otherwise}. The time limit is `comm.late_s`, or `comm.timeout_s` for a save_state.",
            culprits,
        )

    look_s = _LOOK_S

    def judge(missing: list[int], gone: list[int], is_late: bool) -> CommunicationError | None:
        nonlocal look_s
        if gone:
            return came_alone(f"ranks {gone} have ended", gone, watchdog.look_for(wait, enough=gone[0])[1])
        if is_late:
            return came_alone(f"waited {limit_s:.0f} s for ranks {missing}", missing, watchdog.look_for(wait)[1])
        if wait.end is None and wait.seconds >= look_s:
            look_s += _LOOK_S
            in_other_calls, lines = watchdog.look_for(wait)
            if waiting := [rank for rank in missing if rank in in_other_calls]:
                return came_alone(f"ranks {waiting} wait for this rank in another call", waiting, lines)
        return wait.end

    with watchdog.inside(call_of(purpose)) as wait:
        try:
            barrier = Barrier(watchdog.store, ranks, name, is_unique=True)
            if barrier.is_given_up():
                raise came_alone("the other ranks gave up waiting for this rank")
            barrier.wait(limit_s, judge)
        except (dist.DistNetworkError, StoreSilentError) as error:
            silent = str(error) if isinstance(error, StoreSilentError) else None
            raise came_alone(
                silent or "the process that hosts the ranks' store (rank 0 or the launcher) has ended"
            ) from error
        except CommunicationError as error:
            if error.culprits:
                watchdog.leave_reason(f"only some ranks reached {purpose}", error.culprits)
            if error is not wait.end:
                # Each rank shows the error, because rank 0 may not be one of these ranks.
                error.culprits = ()
            raise


def call_of(purpose: str) -> str:
    """Names a call of the script as a collective, for messages such as "has waited in the call of full_grad"."""
    return f"call of {purpose}"
