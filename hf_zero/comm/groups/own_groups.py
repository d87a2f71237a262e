"""Process groups that only engines use.

What a script does in the default group, a barrier on one rank alone for instance, is never taken for ours there, and the time
limit is ours too.
"""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from .arrivals import await_all_ranks, ended_ranks, in_words
from .failures import CommunicationError
from .gloo_threads import in_batch

_MADE: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup | None]]" = (
    weakref.WeakKeyDictionary()
)
"""By the default group that they belong to. torch keeps each group that it ever made, with its connections and threads, until
the default group goes; so engines that are built one after the other take the same ones."""

_MAKING_S, _MAKING_S_A_RANK = 30.0, 0.2
"""What ranks that are all there may take to connect to each other. One that dies just then is waited for that long."""


def own_group(
    ranks: Sequence[int], timeout: timedelta, backend: str | None = None, *, is_urgent: bool = False
) -> dist.ProcessGroup | None:
    """A group of some ranks. Every rank asks for every group, in the same order; those that are not in it get None.

    Args:
        backend: None for that of the default group.
        is_urgent: on an accelerator, its collectives go before kernels that wait for room.

    Raises:
        CommunicationError: a rank did not come, or ended before it was connected.
    """
    made = _MADE.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
    key = (tuple(ranks), timeout, backend, is_urgent)
    if key not in made:
        if dist.get_backend() != "fake":
            await_all_ranks(timeout.total_seconds(), len(made))
        options = urgent_options(backend, timeout) if is_urgent else None
        with in_batch():
            made[key] = _connected(list(ranks), timeout, backend, options)
    return made[key]


def _connected(
    ranks: list[int], timeout: timedelta, backend: str | None, options: object | None
) -> dist.ProcessGroup | None:
    """A new group. gloo's ranks connect to each other inside, for which they have less time than for a collective."""
    limit = timeout
    if "gloo" in (backend or str(dist.get_backend_config())):
        limit = min(timeout, timedelta(seconds=_MAKING_S + _MAKING_S_A_RANK * len(ranks)))
    try:
        group = dist.new_group(ranks, limit, backend, options)
    except RuntimeError as error:
        ended = ended_ranks(ranks)
        why = f"{in_words(ended)} ended: look at what was said there last" if ended else f"torch says: {error}"
        raise CommunicationError(
            f"hf_zero: {in_words(ranks)} could not connect within {limit.total_seconds():.0f} s. {why}", ended
        ) from error
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if limit < timeout:
        _set_pg_timeout(timeout, group)
    return group


def urgent_options(backend: str | None, timeout: timedelta) -> object | None:
    """NCCL's options for a stream of high priority; None for other backends, which have none."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # `new_group` warns of any other.
    options._timeout = timeout
    return options
