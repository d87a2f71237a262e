"""Process groups that only engines use.

What a script does in the default group, a barrier on one rank alone for instance, is never taken for ours there, and the time
limit is ours too.
"""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from .gloo_threads import in_batch

_MADE: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup | None]]" = (
    weakref.WeakKeyDictionary()
)
"""By the default group that they belong to. torch keeps each group that it ever made, with its connections and threads, until
the default group goes; so engines that are built one after the other take the same ones."""


def own_group(
    ranks: Sequence[int], timeout: timedelta, backend: str | None = None, *, is_urgent: bool = False
) -> dist.ProcessGroup | None:
    """A group of some ranks. Every rank asks for every group, in the same order; those that are not in it get None.

    Args:
        backend: None for that of the default group.
        is_urgent: on an accelerator, its collectives go before kernels that wait for room.
    """
    made = _MADE.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
    key = (tuple(ranks), timeout, backend, is_urgent)
    if key not in made:
        options = urgent_options(backend, timeout) if is_urgent else None
        with in_batch():
            group = dist.new_group(list(ranks), timeout, backend, options)
        made[key] = None if group is dist.GroupMember.NON_GROUP_MEMBER else group
    return made[key]


def urgent_options(backend: str | None, timeout: timedelta) -> object | None:
    """NCCL's options for a stream of high priority; None for other backends, which have none."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # `new_group` warns of any other.
    options._timeout = timeout
    return options
