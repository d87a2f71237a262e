"""Split models (tensor or sequence parallelism) in accelerate: their batches and their saves."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import ConfigError
from ..engine.engine import ZeroEngine
from ..extras import extra


def mesh_of_batches(device_type: str, size: int, name: str = "tp_size") -> DeviceMesh:
    """Makes a device mesh for accelerate's data loaders: ranks that compute a batch together get the same batches.

    Args:
        device_type: of the mesh.
        size: number of ranks that compute a batch together.
        name: the setting's name, for the error.

    Raises:
        ConfigError: `size` does not divide the number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if size < 1 or ranks % size:
        raise ConfigError(f"hf_zero: {name} is {size}, which does not divide the {ranks} ranks of this run.")
    # Also named "tp" for sequence parallelism: the loaders give the ranks of this dimension the same whole batches.
    return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("dp_shard", "tp"))


def refuse_other_split(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Raises `ConfigError` if accelerate deals batches for a number of ranks different from the model's split."""
    ranks = engine.world_groups.world_size // engine.groups.world_size
    dealt = getattr(accelerator.parallelism_config, "tp_size", 1)
    if ranks != dealt:
        # The engine has replaced the parameters. Unless closed, a second try would find the model in use.
        engine.close()
        raise ConfigError(
            f"hf_zero: the model is split over {ranks} rank{'s' * (ranks > 1)} but tp_size of the plugin is {dealt}, and "
            f"accelerate distributes batches by it. Pass the model's size: ZeroPlugin(..., tp_size={ranks})."
        )


def cut_sequences(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Makes the engine's model split its sequences over `sp_size` ranks if `sp_size` is above 1. Collective.

    Raises:
        ConfigError: the model or a setting does not support sequence parallelism; the engine is closed.
    """
    size = getattr(accelerator.parallelism_config, "sp_size", 1)
    if size > 1:
        try:
            extra("sequence", "enable_sequence_parallel")(engine, size)
        except ConfigError:
            engine.close()
            raise


@contextmanager
def without_split_models(
    accelerator: Any, in_rows: Collection[nn.Module] | None = None
) -> Iterator[dict[nn.Module, int]]:
    """Hides split models from accelerate, which saves and loads whole models; the engine saves split ones as shards.

    Yields the split models stored whole in the checkpoint, with the number of each one's weights file.

    Args:
        accelerator: the Accelerator.
        in_rows: models stored as shards in the checkpoint to load. accelerate has numbered the files of the remaining models.
    """
    held = accelerator._models
    split = [engine.model for engine in accelerator.zero_engines if engine.state.is_split]
    bare = {model: accelerator.unwrap_model(model, keep_torch_compile=False) for model in held}
    numbered = [model for model in held if bare[model] not in (split if in_rows is None else in_rows)]
    whole = {bare[model]: number for number, model in enumerate(numbered) if bare[model] in split}
    # Keep an empty stand-in: if a model were left out, the next model would get its file number.
    accelerator._models = [_Elsewhere() if bare[m] in whole else m for m in numbered]
    # Trailing stand-ins are not needed, and a Trainer checkpoint with an index has no file of accelerate's name.
    while accelerator._models and isinstance(accelerator._models[-1], _Elsewhere):
        accelerator._models.pop()
    try:
        yield whole
    finally:
        accelerator._models = held


class _Elsewhere(nn.Module):
    """Stands in for a model whose weights file accelerate skips."""

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        return [], []
