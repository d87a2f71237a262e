"""How the ranks of one launch meet and part."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState


@contextmanager
def ranks_together() -> Iterator[None]:
    """Around the main function of a script: its ranks find each other first, and leave together when it is done."""
    if "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
        # `accelerate launch` hands `use_cpu` on to a lone process only: of several, each would silently train by itself.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    yield
    # A DDP wrapper that outlived the process group would take it down while it holds the interpreter, which gloo's
    # threads may be waiting for to let go of their last tensors: the rank would never end.
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
