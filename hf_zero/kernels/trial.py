"""A launch of the smallest kernel, before training depends on one.

That triton can be imported says little: it compiles at the first launch, for which it needs a C compiler, Python's headers, a
folder that it can write to and a driver that it knows.
"""

import torch

from .choose import runs_triton
from .statistics import step_scalars


def launch_fault(device: torch.device) -> str | None:
    """Why kernels do not run in their Triton form on `device`, in one line; None where they do or are not to."""
    if not runs_triton(device):
        return None
    try:
        step_scalars(torch.ones(2, dtype=torch.float64, device=device), max_norm=1.0).tolist()
    except Exception as error:
        # Of any kind: triton raises those of its compiler, of the C compiler's process and of the driver.
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"
    return None
