"""Resolves `auto` settings by trials before training, the same on all ranks."""

import sys
from dataclasses import replace

import torch
from torch import nn

from ...comm.groups.groups import Groups
from ...comm.transport import Transport
from ...comm.trial import Trial
from ...config import AUTO, ConfigError, ZeroConfig
from ...kernels.choose import give_up_triton
from ...kernels.trial import launch_fault
from .wire_trials import resolve_formats


def resolve_auto(
    config: ZeroConfig, model: nn.Module, groups: Groups, transport: Transport, device: torch.device
) -> tuple[ZeroConfig, tuple[Trial, ...]]:
    """The config with kernels that can be launched, and with a form for what travels; and the trials of that. Collective."""
    # First: quantised formats are tried with kernels.
    config = _with_kernels_that_run(config, groups, transport, device)
    return resolve_formats(config, model, groups, transport, device)


def _with_kernels_that_run(
    config: ZeroConfig, groups: Groups, transport: Transport, device: torch.device
) -> ZeroConfig:
    """`kernels: never` where a rank cannot launch any. Kernels round sums in another order than torch, so all ranks follow.

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
