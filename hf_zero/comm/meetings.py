"""Ranks that wait for each other for a bounded time, without disturbing the process group when some do not come."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .groups import Groups
from .transport import CommunicationError


class Meetings:
    """Meetings of all ranks by way of the store they were launched with.

    gloo's own monitored barrier keeps time on rank 0 alone, and a time limit that passes there closes the connections of
    its group.

    Args:
        name: the same on all ranks, and of this transport alone.
    """

    def __init__(self, groups: Groups, name: str):
        self._groups = groups
        self._store = dist.PrefixStore(f"hf_zero/{name}", _get_default_store())
        self._count = 0

    def meet(self, purpose: str, timeout_s: float) -> None:
        """Returns once every rank is here; raises `CommunicationError` after `timeout_s` naming those that are not."""
        self._count += 1
        meeting = dist.PrefixStore(str(self._count), self._store)
        if meeting.check(["given up"]):
            raise _came_alone(purpose, "the others have given up waiting for this rank")
        meeting.set(f"came {self._groups.rank}", "")
        if meeting.add("count", 1) == self._groups.world_size:
            meeting.set("complete", "")
        try:
            meeting.wait(["complete"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            meeting.set("given up", "")
            missing = [rank for rank in range(self._groups.world_size) if not meeting.check([f"came {rank}"])]
            raise _came_alone(purpose, f"waited {timeout_s:.0f} s for ranks {missing}") from error


def _came_alone(purpose: str, what: str) -> CommunicationError:
    return CommunicationError(
        f"hf_zero: only some ranks came to {purpose}; {what}. It is collective: call it on every rank, outside "
        "`if is_main_process`, or wrap the call in `with hf_zero.gathered(model)` on every rank. The time limit is "
        "`comm.gather_timeout_s`."
    )
