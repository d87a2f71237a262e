"""Translates FSDP's settings: `fsdp_config` of accelerate (with `fsdp_` before each name) and of Trainer."""

from collections.abc import Mapping
from typing import Any

from .deepspeed_settings import said_by
from .translation import Table, Translation, instead, mapped, never, one_of, switch, unneeded, unsupported

_WRAPPING = "layers are found by the model's own list; `unit_modules` names different ones"
_XLA = "hf_zero trains on CPUs and GPUs; remove it"
_GATHERED = {"stage": 3}
_STRATEGIES: dict[Any, dict[str, Any]] = {
    "FULL_SHARD": _GATHERED,
    "SHARD_GRAD_OP": {"stage": 2},
    "NO_SHARD": {"stage": 0},
    1: _GATHERED,
    2: {"stage": 2},
    3: {"stage": 0},
}
_HYBRID = "set `comm.shard_group_size` to the number of ranks on a node: each such group shares one copy of the state"


def strategy(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Translates `sharding_strategy`, a name or a number."""
    if value in ("HYBRID_SHARD", 4):
        return mapped(_GATHERED, _HYBRID)
    if value in ("HYBRID_SHARD_ZERO2", 5):
        return mapped({"stage": 2}, _HYBRID)
    return one_of(_STRATEGIES, "`stage` takes 0, 1, 2 or 3")(value, section)


def resharding(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Translates `reshard_after_forward`: a switch in FSDP2, the name of a strategy in FSDP1; accelerate writes text."""
    if isinstance(value, str) and value.upper() in (*_STRATEGIES, "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        return strategy(value.upper(), section)
    if value is None:
        return unneeded("`reshard_after_forward` is left at its default")
    if value is True or (isinstance(value, str) and value.lower() == "true"):
        return mapped({"reshard_after_forward": True})
    if value is False or (isinstance(value, str) and value.lower() == "false"):
        return mapped({"reshard_after_forward": False})
    return unsupported("`reshard_after_forward` takes true or false")


def layers(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Converts class names, a list or text with commas."""
    if value is None or value in ("", []):
        return unneeded("left to `unit_modules: auto`, which finds the layers")
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return mapped({"unit_modules": names})


OF_FSDP: Table = {
    "sharding_strategy": strategy,
    "reshard_after_forward": resharding,
    "transformer_layer_cls_to_wrap": layers,
    "offload_params": switch({"offload.params": "cpu", "offload.optimizer": "cpu"}),
    "cpu_offload": switch({"offload.params": "cpu", "offload.optimizer": "cpu"}),
    "version": never("the engine does not use FSDP 1 or 2"),
    "auto_wrap_policy": never(_WRAPPING),
    "min_num_params": never(_WRAPPING),
    "use_orig_params": never("parameters keep their names and shapes"),
    "backward_prefetch": never("`prefetch_units` sets how many layers are gathered ahead, also in backward"),
    "backward_prefetch_policy": never("`prefetch_units` sets how many layers are gathered ahead, also in backward"),
    "forward_prefetch": never("`prefetch_units` sets how many layers are gathered ahead"),
    "limit_all_gathers": never("`prefetch_units` limits how many layers are gathered at a time"),
    "sync_module_states": never("all ranks start with rank 0's parameters"),
    "state_dict_type": never("`checkpoint.layout: hf` writes complete models, `sharded` one file per rank"),
    "cpu_ram_efficient_loading": never("`with hf_zero.init(plugin):` around from_pretrained does the same"),
    "activation_checkpointing": said_by("activation_checkpointing (gradient_checkpointing before transformers 5.23)"),
    "ignored_modules": instead("freeze parameters that are not trained"),
    "mixed_precision_policy": instead("`param_dtype`, `reduce_dtype` and `gather_dtype` set dtypes"),
    "xla": instead(_XLA),
    "xla_fsdp_settings": instead(_XLA),
    "xla_fsdp_v2": instead(_XLA),
    "xla_fsdp_grad_ckpt": instead(_XLA),
}
"""Keys of an FSDP config, without `fsdp_`."""
