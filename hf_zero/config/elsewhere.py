"""Config files of DeepSpeed, FSDP and accelerate: refused with the settings here that correspond to theirs."""

from collections.abc import Mapping
from typing import Any

from .checks import ConfigError, cut

_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu")
_OF_ACCELERATE = ("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config")

_VALUES = {
    ("stage",): "stage",
    ("offload_optimizer", "device"): "offload.optimizer",
    ("offload_optimizer", "ratio"): "offload.ratio",
    ("offload_optimizer", "nvme_path"): "offload.nvme_path",
    ("offload_param", "device"): "offload.params",
    ("offload_param", "nvme_path"): "offload.nvme_path",
    ("mics_shard_size",): "comm.shard_group_size",
    ("stage3_param_persistence_threshold",): "persist_below_numel",
}
"""Below `zero_optimization`: a setting of DeepSpeed's, and the one here that takes the same value."""

_SWITCHES = {
    "zero_quantized_weights": "comm.weights=int8",
    "zero_quantized_gradients": "comm.gradients=int8",
    "zero_hpz_partition_size": "comm.secondary_shard=node",
}
_SAID_BY_THE_RUN = {
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "bf16": "bf16",
    "fp16": "fp16",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "activation_checkpointing": "gradient_checkpointing",
}
_MEANINGS = {
    "zero_optimization": "it is DeepSpeed's; what is below it stands at the top here",
    "offload_optimizer": "it is DeepSpeed's; here it is `offload.optimizer`: none, cpu or nvme",
    "offload_param": "it is DeepSpeed's; here it is `offload.params`: none, cpu or nvme",
    "reduce_bucket_size": "it is DeepSpeed's; here it is `bucket_bytes`, in bytes",
    "allgather_bucket_size": "it is DeepSpeed's; here it is `bucket_bytes`, in bytes",
    "stage3_prefetch_bucket_size": "it is DeepSpeed's; here it is `prefetch_units`, in layers",
    "stage3_param_persistence_threshold": "it is DeepSpeed's; here it is `persist_below_numel`",
    "communication_data_type": "it is DeepSpeed's; here it is `reduce_dtype`",
    "zero_quantized_weights": "it is DeepSpeed's; here it is `comm.weights: int8`",
    "zero_quantized_gradients": "it is DeepSpeed's; here it is `comm.gradients: int8`",
    "zero_hpz_partition_size": "it is DeepSpeed's; here it is `comm.secondary_shard: node`",
    "mics_shard_size": "it is DeepSpeed's; here it is `comm.shard_group_size`",
    "overlap_comm": "it is DeepSpeed's; the engine always overlaps, so leave it out",
    "contiguous_gradients": "it is DeepSpeed's; gradients are always contiguous here, so leave it out",
    "fsdp_sharding_strategy": "it is FSDP's; FULL_SHARD is `stage: 3`, SHARD_GRAD_OP is `stage: 2`",
    "fsdp_reshard_after_forward": "it is FSDP's; here it is `reshard_after_forward`, at `stage: 3`",
    "fsdp_transformer_layer_cls_to_wrap": "it is FSDP's; here it is `unit_modules`, and auto finds the layers",
    "fsdp_offload_params": "it is FSDP's; here it is `offload.params: cpu` with `offload.optimizer: cpu`",
}


def meaning_elsewhere(key: Any) -> str | None:
    """What a key of another engine's config is here, in words; None for a key that is not known to be one."""
    return _MEANINGS.get(key) if isinstance(key, str) else None


def refuse_files_of_others(settings: Mapping[Any, Any], where: str) -> None:
    """Raises `ConfigError` for DeepSpeed's or accelerate's config, with what to say here in place of it.

    Args:
        where: what holds the settings, for the error.
    """
    if any(key in settings for key in _OF_DEEPSPEED):
        raise ConfigError(_instead_of_deepspeed(settings, where))
    if any(key in settings for key in _OF_ACCELERATE):
        raise ConfigError(
            f"hf_zero config: {cut(where)} is a config of `accelerate launch`, not of hf_zero. Give it to `accelerate launch "
            "--config_file`, with a distributed_type of MULTI_GPU and without fsdp_config and deepspeed_config, and give hf_zero "
            "a stage, settings such as stage=2,offload.optimizer=cpu, or a YAML file (`hf-zero migrate` makes one of it)."
        )


def _instead_of_deepspeed(settings: Mapping[Any, Any], where: str) -> str:
    section = settings.get("zero_optimization")
    section = section if isinstance(section, Mapping) else {}
    same = _same_settings(section)
    said_by_the_run = sorted({name for key, name in _SAID_BY_THE_RUN.items() if key in settings})
    sentences = [f"hf_zero config: {cut(where)} is a config of DeepSpeed, which hf_zero does not read."]
    if same:
        sentences.append(f"The same here: `{','.join(same)}`, as `--zero` or, a line each, in a YAML file.")
    if said_by_the_run:
        sentences.append(
            f"Training arguments, or the script, say the rest: {', '.join(said_by_the_run)} (and no --deepspeed)."
        )
    sentences.append(
        "Bucket sizes and overlap need no settings; `bucket_bytes` and `prefetch_units` are the names here. `hf-zero migrate` "
        "makes a config here of it, and has a word on each key."
    )
    return " ".join(sentences)


def _same_settings(section: Mapping[Any, Any]) -> list[str]:
    same: dict[str, Any] = {}
    for path, name in _VALUES.items():
        value: Any = section
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        if _is_taken_over(value):
            same.setdefault(name, value)
    switched = {key: section.get(key) for key in _SWITCHES}
    on = [_SWITCHES[key] for key, value in switched.items() if value is True or (type(value) is int and value > 1)]
    return [*(f"{name}={value}" for name, value in same.items()), *on]


def _is_taken_over(value: Any) -> bool:
    if type(value) is str:
        return value not in ("auto", "none") and value.isprintable() and len(value) < 100
    return type(value) in (int, float) and 0 <= value < 2**63
