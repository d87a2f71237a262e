"""The most memory a rank has used."""

import resource
import sys

import torch
from accelerate import PartialState
from accelerate.utils import gather


def peak_memory_bytes() -> int:
    """Of all ranks the highest: GPU memory allocated by torch, or on CPU the resident memory of the process.

    Call it on every rank.
    """
    device = PartialState().device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(gather(torch.tensor([peak], device=device)).max())
