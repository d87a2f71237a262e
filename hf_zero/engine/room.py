"""The tier's side of building an engine: whether it has room, who holds state in it, and ranks that fail together."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ..comm.groups import Groups
from ..comm.transport import Transport
from ..config import ConfigError, ZeroConfig
from ..offload.budget import available_host_bytes, disk_fault, host_memory_fault, ranks_on_this_host
from ..offload.files import free_disk_bytes
from ..offload.nvme import NvmeTier
from ..offload.tier import Tier
from .file_holder import InFiles
from .holder import InMemory, StateHolder
from .loaded import wanted_dtype
from .precision import resolve_precision
from .state_kinds import tier_bytes_needed

_Made = TypeVar("_Made")


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


def choose_holder(tier: Tier, optimizers: Sequence[torch.optim.Optimizer]) -> StateHolder:
    """Who holds optimizer state between steps in this tier."""
    return InFiles(tier, optimizers) if isinstance(tier, NvmeTier) else InMemory()


def refuse_unless_it_fits(
    config: ZeroConfig,
    tier: Tier,
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    groups: Groups,
    transport: Transport,
) -> None:
    """Raises, on every rank alike, where the memory or the disk would not hold what `offload.optimizer` moves there.

    Collective where state is moved.

    Raises:
        MemoryError: host memory. OSError: the disk.
    """
    if not config.offload.moves_state:
        return
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
        fault = host_memory_fault(needed, available_host_bytes(), ranks)
    faults = [theirs for theirs in transport.exchange(fault) if theirs is not None]
    if faults:
        raise OSError(faults[0]) if in_files else MemoryError(faults[0])
