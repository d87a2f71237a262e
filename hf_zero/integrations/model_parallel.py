"""Models split over ranks by transformers (tensor and expert parallelism), with hf_zero over the copies."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import nn

from ..config import ConfigError


@cache
def _config_class() -> type:
    # Imported here, because older releases of transformers lack this class.
    from transformers.distributed import DistributedConfig

    class ZeroDistributedConfig(DistributedConfig):
        """A `DistributedConfig` whose data axis belongs to hf_zero: transformers splits the model without FSDP."""

        @property
        def dp_size(self) -> int:
            # transformers uses FSDP if `dp_size` is above 1, and builds no mesh if dp_size, tp_size and pp_size are all 1.
            # Experts need the mesh, so return 0 for them.
            return 0 if self.tp_size == 1 and self.ep_size > 1 else 1

    if not hasattr(DistributedConfig, "dp_size"):
        raise ConfigError("hf_zero: models that are split over ranks need transformers 5.23 or newer.")
    return ZeroDistributedConfig


def parallel_config(*, tp_size: int = 1, ep_size: int = 1, **kwargs: Any) -> Any:
    """Returns the `distributed_config` with which transformers loads a model split over ranks; hf_zero shards over the copies.

        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=hf_zero.parallel_config(tp_size=2))

    Args:
        tp_size: number of ranks over which each layer is split, and which compute each batch together.
        ep_size: number of ranks over which a mixture's experts are split: 1 if experts are split like other layers, or a
            multiple of `tp_size`. Each `tp_size` of these ranks compute a separate batch, and send its tokens to the experts.
        kwargs: further arguments of transformers' `DistributedConfig`, such as `tp_plan`.

    Raises:
        ConfigError: the sizes do not fit the ranks, or an axis cannot be combined with hf_zero.
    """
    others = {"pp_size": "a pipeline", "fsdp_size": "FSDP", "dp_replicate_size": "replicas of FSDP"}
    for name, what in others.items():
        if kwargs.get(name) not in (None, 1):
            raise ConfigError(
                f"hf_zero: {name}={kwargs[name]} ({what}) cannot be combined with hf_zero. Remove it: hf_zero shards over all "
                "ranks that tp_size does not use." + (_OF_PIPELINES if name == "pp_size" else "")
            )
    ranks = dist.get_world_size() if dist.is_initialized() else max(tp_size, ep_size)
    if ranks % tp_size:
        raise ConfigError(f"hf_zero: tp_size is {tp_size}, which does not divide the {ranks} ranks of this run.")
    allowed = [size for size in range(1, ranks + 1) if size == 1 or (size % tp_size == 0 and ranks % size == 0)]
    if ep_size not in allowed:
        raise ConfigError(
            f"hf_zero: ep_size is {ep_size}; allowed with tp_size {tp_size} on {ranks} ranks: {', '.join(map(str, allowed))}."
        )
    if ep_size > tp_size:
        # As transformers lays out the mesh for FSDP, without FSDP.
        return _config_class()(tp_size=tp_size, ep_size=ep_size, fsdp_size=ranks // tp_size, **kwargs)
    return _config_class()(tp_size=tp_size, ep_size=ep_size, dp_replicate_size=ranks // tp_size, **kwargs)


_OF_PIPELINES = " (transformers' pipeline is for generation: its stages send no gradients back.)"


@contextmanager
def as_if_whole(model: nn.Module) -> Iterator[None]:
    """Marks the model as whole while one rank saves; transformers would otherwise call collectives."""
    config: Any = getattr(model, "config", None)
    said = None if config is None else config.__dict__.get("distributed_config")
    if said is None:
        yield
        return
    config.distributed_config = None
    try:
        yield
    finally:
        config.distributed_config = said
