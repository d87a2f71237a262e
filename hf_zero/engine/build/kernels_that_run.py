"""Whether kernels can be launched, tried before training, the same on all ranks."""

import sys
from dataclasses import replace

import torch

from ...comm.groups.groups import Groups
from ...comm.transport import Transport
from ...config import AUTO, ConfigError, ZeroConfig
from ...kernels.choose import give_up_triton
from ...kernels.trial import launch_fault


def with_kernels_that_run(config: ZeroConfig, groups: Groups, transport: Transport, device: torch.device) -> ZeroConfig:
    """`kernels: never` where a rank cannot launch any. Collective.

    Kernels round sums in another order than torch, so all ranks follow.

    Raises:
        ConfigError: with `kernels: always`.
    """
    faults = transport.exchange(launch_fault(device))
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
    if not found:
        return config
    rank, fault = found[0]
    what = f"triton cannot launch a kernel on rank {rank} ({fault})"
    remedy = (
        "Triton compiles at the first launch, with a C compiler, Python's headers (python3-dev) and a cache to write to"
    )
    if config.kernels == "always":
        raise ConfigError(f"hf_zero: `kernels: always`, but {what}. {remedy}; or use `kernels: auto`.")
    give_up_triton(device)
    if groups.is_first_of_run:
        print(f"hf_zero: {what}; torch's operations do what kernels would. {remedy}.", file=sys.stderr, flush=True)
    return replace(config, kernels="never") if config.kernels == AUTO else config
