"""What cannot be combined with a model that tensor or expert parallelism has split over ranks."""

from collections.abc import Sequence

import torch

from ...config import ConfigError, ZeroConfig
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
