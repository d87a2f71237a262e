"""Whether a tier has room for the state that the config would put there, asked before anything is allocated."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..comm.groups import Groups
from ..comm.transport import Transport
from ..config import ZeroConfig
from ..offload.budget import available_host_bytes, host_memory_fault, ranks_on_this_host
from .loaded import wanted_dtype
from .precision import resolve_precision
from .state_kinds import tier_bytes_needed


def refuse_unless_it_fits(
    config: ZeroConfig,
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    groups: Groups,
    transport: Transport,
) -> None:
    """Raises `MemoryError`, on every rank alike, where host memory would not hold what `offload.optimizer: cpu` moves there.

    Collective where state is moved.
    """
    if config.offload.optimizer != "cpu":
        return
    needed = tier_bytes_needed(
        owner, optimizers, lambda p: resolve_precision(config, wanted_dtype(p), apart=True), groups.shard_size
    )
    fault = host_memory_fault(needed, available_host_bytes(), ranks_on_this_host())
    faults = [theirs for theirs in transport.exchange(fault) if theirs is not None]
    if faults:
        raise MemoryError(faults[0])
