"""Makes waits for collectives fail that would go on."""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

_TAG = 0x5A4B0000
_AT_ONCE = timedelta(milliseconds=1)


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
