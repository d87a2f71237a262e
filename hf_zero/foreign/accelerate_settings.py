"""Translates a config file of `accelerate config`. The launcher's own keys stay in the accelerate file."""

from collections.abc import Mapping
from typing import Any

from .deepspeed_settings import IN_ACCELERATE, SEQUENCES
from .fsdp_settings import OF_FSDP
from .translation import Rule, Table, Translation, instead, is_off, never, unneeded, unsupported

_LAUNCHER = "a setting of the launcher: keep it in accelerate's config"
_TPU = "hf_zero trains on CPUs and GPUs"
_OF_LAUNCHER = (
    *("compute_environment", "debug", "num_processes", "machine_rank", "num_machines", "gpu_ids", "rdzv_backend"),
    *("main_process_ip", "main_process_port", "main_training_function", "same_network", "enable_cpu_affinity"),
    *("use_cpu", "ipex_config", "mpirun_config", "command_file", "commands", "num_cpu_threads_per_process"),
    *("dynamo_config", "dynamo_backend", "fp8_config", "gradient_accumulation_steps", "mixed_precision", "env"),
)


def kind(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Translates `distributed_type`."""
    if value in ("FSDP", "DEEPSPEED"):
        return unneeded("set MULTI_GPU in accelerate's config: the script enables hf_zero, or `-m hf_zero.run` does")
    if value in ("MEGATRON_LM", "XLA", "TP"):
        return unsupported(f"{value} splits or places models itself; two engines cannot own one model")
    return unneeded(_LAUNCHER)


def axis(advice: str) -> Rule:
    """Makes a rule which refuses more than one rank along an axis, with this advice."""

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        if is_off(value) or value == 1:
            return unneeded("off, or left at its default")
        return unsupported(advice)

    return rule


def shards(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Translates the data-parallel sizes, which accelerate counts separately from the ranks of a sequence."""
    if section.get("parallelism_config_sp_size") not in (None, 1):
        return unneeded("state is sharded over all ranks, including those of a sequence")
    return axis("`comm.shard_group_size` sets how many ranks share one copy of the state")(value, section)


OF_PARALLELISM: Table = {
    "dp_replicate_size": shards,
    "dp_shard_size": shards,
    "tp_size": axis("load the model with `hf_zero.parallel_config(tp_size=...)`"),
    "cp_size": axis("context parallelism is not available: use `sp_size`"),
    "cp_backend": never("context parallelism is not available"),
    "cp_comm_strategy": never("context parallelism is not available"),
    "sp_size": never(SEQUENCES),
    "sp_backend": never("hf_zero splits sequences itself"),
    "sp_seq_length": never("sequences may have any length"),
    "sp_seq_length_is_variable": never("sequences may have any length"),
    "sp_attn_implementation": never("the model's own `attn_implementation` sets the attention"),
}
"""Keys below `parallelism_config` of an accelerate config, without `parallelism_config_`."""

OF_ACCELERATE: Table = {
    "distributed_type": kind,
    **{f"fsdp_config.{prefix}{path}": rule for path, rule in OF_FSDP.items() for prefix in ("fsdp_", "")},
    **{f"deepspeed_config.{path}": rule for path, rule in IN_ACCELERATE.items()},
    **{key: never(_LAUNCHER) for key in _OF_LAUNCHER},
    "downcast_bf16": instead(_TPU),
    **{f"tpu_{key}": instead(_TPU) for key in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")},
    "megatron_lm_config": instead("Megatron-LM splits models itself; two engines cannot own one model"),
    **{f"parallelism_config.parallelism_config_{name}": rule for name, rule in OF_PARALLELISM.items()},
}
"""Keys of an accelerate config."""
