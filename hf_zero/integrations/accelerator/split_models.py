"""Models that are split over ranks, and accelerate: which batches their ranks get, and who saves them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...config import ConfigError
from ...engine.engine import ZeroEngine


def mesh_of_batches(device_type: str, tp_size: int) -> DeviceMesh:
    """The mesh by which accelerate's data loaders give the ranks of one copy of a model the same batches.

    Raises:
        ConfigError: `tp_size` does not divide the ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if tp_size < 1 or ranks % tp_size:
        raise ConfigError(f"hf_zero: tp_size is {tp_size}, which does not divide the {ranks} ranks of this run.")
    return init_device_mesh(device_type, (ranks // tp_size, tp_size), mesh_dim_names=("dp_shard", "tp"))


def refuse_other_split(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Raises `ConfigError` for a model that is split over another number of ranks than accelerate deals batches by."""
    ranks = engine.world_groups.world_size // engine.groups.world_size
    dealt = getattr(accelerator.parallelism_config, "tp_size", 1)
    if ranks != dealt:
        engine.close()
        raise ConfigError(
            f"hf_zero: the model is split over {ranks} rank{'s' * (ranks > 1)} and tp_size of the plugin is {dealt}, by which "
            f"accelerate deals batches. Give it the model's: ZeroPlugin(..., tp_size={ranks})."
        )


@contextmanager
def split_models_aside(accelerator: Any, *, all_of_them: bool = False) -> Iterator[None]:
    """accelerate saves and loads whole models; those that are split over ranks are saved and loaded as rows.

    Args:
        all_of_them: the checkpoint has the weights of others as rows too.
    """
    held = accelerator._models
    aside = [engine.model for engine in accelerator.zero_engines if all_of_them or engine.state.is_split]
    accelerator._models = [m for m in held if accelerator.unwrap_model(m, keep_torch_compile=False) not in aside]
    try:
        yield
    finally:
        accelerator._models = held
