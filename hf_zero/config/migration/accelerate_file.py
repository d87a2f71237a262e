"""An accelerate config, as `accelerate config` writes it: what is the launcher's stays there."""

from collections.abc import Mapping
from typing import Any

from .deepspeed import IN_ACCELERATE
from .fsdp import OF_FSDP
from .rules import Table, Verdict, instead, never, unneeded, unsupported

_LAUNCHER = "it is the launcher's: leave it in accelerate's config"
_TPU = "hf_zero trains on CPUs and GPUs"
_OF_LAUNCHER = (
    *("compute_environment", "debug", "num_processes", "machine_rank", "num_machines", "gpu_ids", "rdzv_backend"),
    *("main_process_ip", "main_process_port", "main_training_function", "same_network", "enable_cpu_affinity"),
    *("use_cpu", "ipex_config", "mpirun_config", "command_file", "commands", "num_cpu_threads_per_process"),
    *("dynamo_config", "dynamo_backend", "fp8_config", "gradient_accumulation_steps", "mixed_precision", "env"),
)


def kind(value: Any, section: Mapping[Any, Any]) -> Verdict:
    """`distributed_type`."""
    if value in ("FSDP", "DEEPSPEED"):
        return unneeded("say MULTI_GPU in accelerate's config: hf_zero comes with the script, or by `-m hf_zero.run`")
    if value in ("MEGATRON_LM", "XLA", "TP"):
        return unsupported(f"{value} splits or places models by itself; two engines cannot own one model")
    return unneeded(_LAUNCHER)


OF_ACCELERATE: Table = {
    "distributed_type": kind,
    **{f"fsdp_config.{prefix}{path}": rule for path, rule in OF_FSDP.items() for prefix in ("fsdp_", "")},
    **{f"deepspeed_config.{path}": rule for path, rule in IN_ACCELERATE.items()},
    **{key: never(_LAUNCHER) for key in _OF_LAUNCHER},
    "downcast_bf16": instead(_TPU),
    **{f"tpu_{key}": instead(_TPU) for key in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")},
    "megatron_lm_config": instead("Megatron-LM splits models by itself; two engines cannot own one model"),
    "parallelism_config": instead(
        "`comm.shard_group_size` is how many ranks share one copy of the state; layers are not split"
    ),
}
"""Keys of an accelerate config."""
