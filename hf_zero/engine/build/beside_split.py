"""What cannot be combined with a model that tensor or expert parallelism has split over ranks."""

from collections.abc import Sequence

import torch

from ...config import AUTO, ConfigError, ZeroConfig
from ...optimizer.state.elementwise import UpdateScope, update_scope_of
from ..units.split_model import SplitModel


def refuse_beside_split(split: SplitModel, config: ZeroConfig, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises `ConfigError` for settings and optimizers that need whole parameters where a rank has a part of them."""
    if split.is_empty:
        return
    if config.comm.sync_every > 1:
        raise ConfigError(
            f"hf_zero config: `comm.sync_every` is {config.comm.sync_every}, and the model is split over ranks (tensor or expert "
            "parallel), all of which take each step together. Leave `comm.sync_every` at 1."
        )
    if split.experts:
        _refuse_beside_experts(config)
    if config.out_of_memory == "halve":
        raise ConfigError(
            "hf_zero config: `out_of_memory: halve` does not go with a model that is split over ranks (tensor or expert "
            "parallel): in the middle of a forward, the others would wait for the results of the rank that has failed. Leave "
            "`out_of_memory` at stop."
        )
    for optimizer in optimizers:
        if update_scope_of(optimizer) in (UpdateScope.PARAMETER, UpdateScope.MODEL):
            raise ConfigError(
                f"hf_zero: the optimizer {type(optimizer).__name__} updates an element by what the rest of its parameter is, and "
                "the model is split over ranks (tensor or expert parallel), so that a rank has parts of parameters only. Use one "
                "that goes element by element (AdamW, SGD, Lion, ...), or load the model without tp_size and ep_size."
            )


def _refuse_beside_experts(config: ZeroConfig) -> None:
    """The same where experts are split over more ranks than compute a batch together."""
    apart = "experts are split over more ranks than the rest of the model (ep_size above tp_size), and have groups of their own"
    if config.comm.shard_group_size != AUTO:
        raise ConfigError(
            f"hf_zero config: `comm.shard_group_size` is {config.comm.shard_group_size}, and {apart}, which it does not say the "
            "size of. Leave `comm.shard_group_size` at auto, or give ep_size the value of tp_size."
        )
    if config.comm.secondary_shard != "none":
        raise ConfigError(
            f"hf_zero config: `comm.secondary_shard` is {config.comm.secondary_shard}, and {apart}, not all of which may have "
            "several ranks on a node. Leave `comm.secondary_shard` at none, or give ep_size the value of tp_size."
        )
