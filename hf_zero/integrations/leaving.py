"""A clean end of the process: nothing in flight, then the process group goes."""

import atexit
import logging
import sys
import weakref

import torch.distributed as dist
from accelerate import Accelerator

logger = logging.getLogger(__name__)


def end_cleanly(accelerator: Accelerator) -> None:
    """Registers what this Accelerator's process does before it exits.

    gloo's threads abort a process that exits while they have work, with "terminate called without an active exception".
    After an error nothing is waited for: the peers may be gone, and the error is what should be seen.
    """
    atexit.register(_leave, weakref.ref(accelerator))


def _leave(reference: weakref.ref) -> None:
    accelerator = reference()
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    try:
        for engine in accelerator.zero_engines if accelerator is not None else ():
            engine.finish_parameters()
            engine.transport.leave()
        # Only after everyone has sent and received all: a peer that is still reading would see this end as a failure.
        dist.barrier()
    except RuntimeError as error:
        logger.warning(
            f"hf_zero: this rank has come to its end, and another one has not ({error}). Look at what that one printed: its "
            "error is the reason."
        )
    dist.destroy_process_group()
