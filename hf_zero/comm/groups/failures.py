"""Errors of failed collectives, and how waits that would go on are made to fail."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

_TAG = 0x5A4B0000
_AT_ONCE = timedelta(milliseconds=1)


class CommunicationError(RuntimeError):
    """A collective failed: says which, which rank is the reason, and what the ranks were in.

    Attributes:
        culprits: the ranks that are the reason, where they are known.
    """

    def __init__(self, message: str, culprits: Sequence[int] = ()):
        super().__init__(message)
        self.culprits = tuple(culprits)


class PeerFailure(RuntimeError):
    """A message from or to one rank failed.

    Attributes:
        rank: the other rank.
    """

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


def break_all_groups() -> None:
    """Has all waits of this process for collectives fail. No process group can be used behind that."""
    for group in list(_world.pg_map):
        for device in group._device_types:
            _break(group._get_backend(device), group)


def _break(backend: Any, group: dist.ProcessGroup) -> None:
    # torch's types know nothing of what a backend can do.
    if backend.name() != "gloo":
        # NCCL's may wait for its device.
        threading.Thread(target=backend.abort, name="hf_zero abort", daemon=True).start()
        return
    # gloo's own `abort` leaves waits that have begun. It closes all connections of a group in which one wait is out of time.
    other = 1 if group.rank() == 0 else 0
    try:
        group.recv([torch.zeros(1)], other, _TAG).wait(_AT_ONCE)
    except RuntimeError:
        return
