"""A clean end of the process: no communication in flight when the process group is destroyed."""

import atexit
import logging
import sys
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from accelerate import Accelerator

from ..engine.engine import ZeroEngine
from ..presence.arrivals import CommunicationError, leave_together, register_process
from ..presence.error_hook import ErrorHook

logger = logging.getLogger(__name__)


_PATIENCE_S = 30.0


def end_cleanly(accelerator: Accelerator) -> None:
    """Registers this Accelerator's work at the exit of the process, and the hook for reporting its last error."""
    if dist.is_initialized():
        register_process()
        # A weak reference, because atexit keeps its arguments until the end of Python, and the Accelerator refers to the
        # models.
        atexit.register(_leave, weakref.ref(accelerator))
        ErrorHook.installed().follow(accelerator)


def _leave(reference: weakref.ref) -> None:
    accelerator = reference()
    # After an error do not wait: peers may be gone, and the user must see the error at once.
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    leave(accelerator.zero_engines if accelerator is not None else [], waits=True)
    # Destroyed last, because everything above communicates over the process group.
    dist.destroy_process_group()


def leave(engines: Sequence[ZeroEngine], *, waits: bool = False) -> None:
    """Finishes running work before the process group is destroyed, and waits for ranks that are still reading.

    Args:
        engines: the engines of this process.
        waits: whether to wait even without an engine.
    """
    try:
        for engine in engines:
            # gloo's threads abort the process if it exits while they work.
            engine.finish_parameters()
    except CommunicationError as error:
        logger.warning(f"{error} This rank had finished its script.")
    # A peer still reading would regard this exit as a failure; a peer waiting for this rank must notice the exit.
    watches = [engine.transport.watch for engine in engines]
    # With an engine, its watch announces this rank's end and keeps the store alive for ranks still at work.
    at_work = leave_together(_PATIENCE_S) if waits and not watches else []
    for watch in watches:
        # The time is shared among the engines, so a rank with several models waits no longer than a rank with one.
        at_work = watch.leave(_PATIENCE_S / len(watches))
    if at_work:
        logger.warning(
            f"hf_zero: rank {dist.get_rank()} has finished its script and exits now, while ranks {at_work} are still running. "
            "Their later collectives with this rank will fail."
        )
