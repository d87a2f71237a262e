"""A clean end of the process: nothing in flight, then the process group goes."""

import atexit
import logging
import sys
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from accelerate import Accelerator

from ...comm.control.last_words import LastWords
from ...comm.groups.processes import RankProcesses
from ...comm.transport import CommunicationError
from ...engine.engine import ZeroEngine

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0


def end_cleanly(accelerator: Accelerator) -> None:
    """Registers what this Accelerator's process does before it exits, and where it tells of an error.

    gloo's threads abort a process that exits while they have work, with "terminate called without an active exception".
    After an error nothing is waited for: the peers may be gone, and the error is what should be seen.
    """
    if dist.is_initialized():
        processes = RankProcesses()
        processes.register()
        atexit.register(_leave, weakref.ref(accelerator), processes)
        LastWords.installed().follow(accelerator)


def _leave(reference: weakref.ref, processes: RankProcesses) -> None:
    accelerator = reference()
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    leave(accelerator.zero_engines if accelerator is not None else [], processes)
    dist.destroy_process_group()


def leave(engines: Sequence[ZeroEngine], processes: RankProcesses | None = None) -> None:
    """Before the process group goes: ends what is under way, and waits for ranks that are still reading."""
    try:
        for engine in engines:
            engine.finish_parameters()
    except CommunicationError as error:
        logger.warning(f"{error} This rank had come to its end.")
    # A peer that is still reading would see this end as a failure. One that waits for this rank is to see it.
    watches = [engine.transport.watch for engine in engines]
    at_work = [] if watches or processes is None else processes.leave(_PATIENCE_S)
    for watch in watches:
        at_work = watch.leave(_PATIENCE_S / len(watches))
    if at_work:
        logger.warning(
            f"hf_zero: rank {dist.get_rank()} has come to the end of its script and ends now, while ranks {at_work} are still at "
            "work. What they have yet to do together with it fails."
        )
