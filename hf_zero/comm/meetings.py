"""Ranks that wait for each other for a bounded time, without disturbing the process group when some do not come."""

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .groups import Groups
from .processes import RankProcesses
from .transport import CommunicationError

_PAUSE_S = 0.02


class Meetings:
    """Meetings of all ranks by way of the store they were launched with.

    gloo's own monitored barrier keeps time on rank 0 alone, and a time limit that passes there closes the connections of
    its group. A store tells nobody that a rank has died, so those that are waited for are looked for.

    Args:
        name: the same on all ranks, and of this transport alone.
    """

    def __init__(self, groups: Groups, name: str):
        self._ranks = groups.world.ranks
        self._own = self._ranks[groups.world.place]
        self._processes = RankProcesses()
        self._store = dist.PrefixStore(f"hf_zero/{name}", _get_default_store())
        self._count = 0

    def meet(self, purpose: str, timeout_s: float) -> None:
        """Returns once every rank is here.

        Raises:
            CommunicationError: `timeout_s` have passed, or a rank has ended or left without coming; names those that did not
                come.
        """
        self._count += 1
        try:
            self._meet(dist.PrefixStore(str(self._count), self._store), purpose, timeout_s)
        except dist.DistNetworkError as error:
            raise _came_alone(
                purpose, "the process that keeps the ranks' store has ended, rank 0's or the launcher's"
            ) from error

    def _meet(self, meeting: dist.Store, purpose: str, timeout_s: float) -> None:
        if meeting.check(["given up"]):
            raise _came_alone(purpose, "the others have given up waiting for this rank")
        meeting.set(f"came {self._own}", "")
        if meeting.add("count", 1) == len(self._ranks):
            meeting.set("complete", "")
        deadline_s, pause_s = time.monotonic() + timeout_s, 1e-3
        while not meeting.check(["complete"]):
            missing = [rank for rank in self._ranks if not meeting.check([f"came {rank}"])]
            lost = [rank for rank in missing if self._processes.has_gone(rank)]
            if lost or time.monotonic() >= deadline_s:
                meeting.set("given up", "")
                what = f"waited {timeout_s:.0f} s for ranks {missing}"
                raise _came_alone(purpose, f"ranks {lost} have ended" if lost else what)
            # Not by the store's own `wait`: at the end of a patience it prints warnings.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)


def _came_alone(purpose: str, what: str) -> CommunicationError:
    return CommunicationError(
        f"hf_zero: only some ranks came to {purpose}; {what}. It is collective: call it on every rank, outside "
        "`if is_main_process`, or wrap the call in `with hf_zero.gathered(model)` on every rank. The time limit is "
        "`comm.gather_timeout_s`, and of a save_state `comm.timeout_s`."
    )
