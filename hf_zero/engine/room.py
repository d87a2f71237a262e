"""The tier's side of building an engine: whether it has room, who holds state in it, and ranks that fail together."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ..comm.groups import Groups
from ..comm.transport import Transport
from ..config import AUTO, ConfigError, OffloadConfig, ZeroConfig
from ..device import free_bytes
from ..offload.budget import available_host_bytes, disk_fault, host_memory_fault, ranks_on_this_host
from ..offload.files import free_disk_bytes
from ..offload.nvme import NvmeTier
from ..offload.tier import Tier
from .delayed_holder import Delayed
from .early_holder import SteppedEarly
from .file_holder import InFiles
from .holder import InMemory, StateHolder
from .loaded import wanted_dtype
from .precision import resolve_precision
from .state_kinds import tier_bytes_needed
from .stochastic_holder import RoundedStochastically

_Made = TypeVar("_Made")

_ROOM_TO_KEEP_WHOLE = 4
"""`reshard_after_forward: auto` keeps parameters whole where they take less than this part of the free memory."""


def together(transport: Transport, make: Callable[[], _Made]) -> _Made:
    """What `make` returns, if it succeeds on every rank; else the first rank's `ConfigError`, on every rank."""
    made, fault = None, None
    try:
        made = make()
    except ConfigError as error:
        fault = str(error)
    faults = [theirs for theirs in transport.exchange(fault) if theirs is not None]
    if faults:
        raise ConfigError(faults[0])
    return made


def choose_holder(
    config: ZeroConfig,
    tier: Tier,
    optimizers: Sequence[torch.optim.Optimizer],
    transport: Transport,
    *,
    state_bytes: int,
) -> StateHolder:
    """Who holds optimizer state between steps in this tier.

    Args:
        state_bytes: that `refuse_unless_it_fits` has found to fit.
    """
    if isinstance(tier, NvmeTier):
        return InFiles(tier, optimizers, transport)
    if config.rounding == "stochastic":
        return RoundedStochastically(optimizers)
    offload = config.offload
    threads = step_threads(offload, tier.device)
    if offload.delay:
        return Delayed(optimizers, threads, warmup=offload.delay_warmup)
    most_bytes = speculate_bytes(offload, tier.device, state_bytes) if offload.moves_state else 0
    return SteppedEarly(optimizers, threads, most_bytes=most_bytes) if most_bytes else InMemory()


def step_threads(config: OffloadConfig, device: torch.device) -> int:
    """CPU threads of a step beside training on `device`: the ranks of a host share its cores."""
    if config.threads != AUTO:
        return config.threads
    # Launchers give a rank one thread unless they are told otherwise: beside an accelerator, the step needs its part of them.
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.get_num_threads() if device.type == "cpu" else max(1, mine // ranks_on_this_host())


def speculate_bytes(config: OffloadConfig, device: torch.device, state_bytes: int) -> int:
    """Host memory that copies for early steps may take on this rank, whose backward runs on `device`."""
    if config.speculate_bytes != AUTO:
        return config.speculate_bytes
    # On the host, a step during backward would take the cores that backward runs on.
    return 0 if device.type == "cpu" else max(0, available_host_bytes() // ranks_on_this_host() - state_bytes) // 2


def refuse_unless_it_fits(
    config: ZeroConfig,
    tier: Tier,
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    groups: Groups,
    transport: Transport,
) -> int:
    """Bytes of this rank that move, once it is known that they fit. Collective where state is moved.

    Raises, on every rank alike:
        MemoryError: host memory would not hold what `offload.optimizer` moves there. OSError: the disk would not.
    """
    if not config.offload.moves_state:
        return 0
    in_files = isinstance(tier, NvmeTier)
    needed = tier_bytes_needed(
        owner,
        optimizers,
        lambda p: resolve_precision(config, wanted_dtype(p), apart=tier.is_apart),
        groups.shard_size,
        with_gradients=not in_files,
    )
    # At least: whole buckets move.
    needed = int(config.offload.ratio * needed)
    ranks = ranks_on_this_host()
    if in_files:
        fault = disk_fault(needed, free_disk_bytes(Path(config.offload.nvme_path)), ranks, config.offload.nvme_path)
    else:
        # There are no more copies than there is state.
        asked = 0 if config.offload.speculate_bytes == AUTO else config.offload.speculate_bytes
        copies = needed if config.offload.delay else min(asked, needed)
        fault = host_memory_fault(needed + copies, available_host_bytes(), ranks)
    faults = [theirs for theirs in transport.exchange(fault) if theirs is not None]
    if faults:
        raise OSError(faults[0]) if in_files else MemoryError(faults[0])
    return needed


def reshards_after_forward(config: ZeroConfig, model: nn.Module, device: torch.device, transport: Transport) -> bool:
    """Whether a layer is dropped after its forward; `auto` keeps what would take little of the free memory. Collective then."""
    if config.reshard_after_forward != AUTO:
        return config.reshard_after_forward
    whole = sum(p.nbytes for p in model.parameters())
    return whole * _ROOM_TO_KEEP_WHOLE > min(transport.exchange(free_bytes(device)))
