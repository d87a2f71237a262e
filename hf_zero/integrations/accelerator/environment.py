"""What the launcher set up, held against what was asked for: found at the start, said in one paragraph."""

import os

import psutil
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType, DistributedType

from ...config import ConfigError

_SWITCHES = {
    "ACCELERATE_USE_FSDP": ("FSDP", "--use_fsdp", "--fsdp or an fsdp_plugin"),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "--use_deepspeed", "--deepspeed or a deepspeed_plugin"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "--use_megatron_lm", "a megatron_lm_plugin"),
}
_SPLITS = ("DP_SHARD", "CP", "SP")
"""What hf_zero cannot be combined with; tensor parallelism can, and is told to the plugin."""
_YES = ("1", "true", "t", "yes", "y", "on")


def refuse_engines_of_the_launch() -> None:
    """Raises `ConfigError` where the launch, or an argument that accelerate has seen, asks for another engine.

    accelerate notes plugins that it is given in the same variables; on a CPU that is all it does with them.
    """
    for variable, (engine, flag, argument) in _SWITCHES.items():
        value = os.environ.get(variable, "")
        if value.lower() in _YES:
            raise ConfigError(
                f"hf_zero: {engine} is asked for as well: {variable} is {value!r}, which `accelerate launch {flag}`, its config "
                f"file, {argument} set. Two engines cannot own one model. Leave that out (and unset {variable}), or do without "
                "hf_zero."
            )
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in _YES:
        for split in (*_SPLITS, "TP"):
            _refuse_split(f"PARALLELISM_CONFIG_{split}_SIZE", os.environ.get(f"PARALLELISM_CONFIG_{split}_SIZE", "1"))


def refuse_split_models(parallelism: ParallelismConfig) -> None:
    """Raises `ConfigError` for accelerate's own way to split a model or its batches over ranks."""
    for split in _SPLITS:
        _refuse_split(f"ParallelismConfig.{split.lower()}_size", str(getattr(parallelism, f"{split.lower()}_size", 1)))


def _refuse_split(name: str, value: str) -> None:
    if value not in ("", "1", "None"):
        raise ConfigError(
            f"hf_zero: {name} is {value}: accelerate is to split the model or its batches over ranks in a way of its own. Two "
            "engines cannot own one model. Leave it at 1; `comm.shard_group_size` is how many ranks share one copy of the state, "
            "and ZeroPlugin(tp_size=...) is of models that tensor parallelism has split."
        )


def _refuse_comm_hooks(accelerator: Accelerator) -> None:
    """Raises `ConfigError` for a hook that would have DDP send gradients in another form."""
    asked = accelerator.ddp_handler
    for field in ("comm_hook", "comm_wrapper") if asked is not None else ():
        hook = DDPCommunicationHookType(getattr(asked, field))
        if hook is not DDPCommunicationHookType.NO:
            raise ConfigError(
                f"hf_zero: DistributedDataParallelKwargs has {field}={hook.value}, a hook of DDP, and hf_zero reduces gradients "
                "in place of DDP. Leave it out. `reduce_dtype: bfloat16` or float16 sends gradients in 16 bits, and "
                "`comm.gradients: int8` in 8."
            )


def check_environment(accelerator: Accelerator) -> None:
    """Raises `ConfigError` for a launch that contradicts the engine: another sharder, or fewer ranks than were asked for.

    So do hooks of DDP's.
    """
    refuse_engines_of_the_launch()
    _refuse_comm_hooks(accelerator)
    if accelerator.parallelism_config is not None:
        refuse_split_models(accelerator.parallelism_config)
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigError(
            f"hf_zero: accelerate runs with distributed_type={kind.value}, which shards by itself. Two engines cannot own one "
            "model. Launch without --use_fsdp, --use_deepspeed, --use_megatron_lm and their plugins, or do without hf_zero."
        )
    asked = _ranks_asked_for()
    if asked is not None and asked != accelerator.num_processes:
        raise ConfigError(
            f"hf_zero: {asked} processes were asked for, and accelerate counts {accelerator.num_processes} in each of them, so "
            "data and state would not be split. `accelerate launch --cpu --num_processes N` starts a single process, and ranks "
            "on a machine without a GPU find each other only with ACCELERATE_USE_CPU=true. For N ranks on CPU: "
            "`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N --num_machines 1 script.py` or "
            "`ACCELERATE_USE_CPU=true torchrun --nproc_per_node N script.py`."
        )


def _ranks_asked_for() -> int | None:
    """The world size that the launcher set or was asked for on its command line; None where there is no sign of one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"])
    launcher = psutil.Process().parent()
    try:
        words = launcher.cmdline() if launcher is not None else []
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        # A launcher that may not be looked at, or that ended: no sign.
        return None
    return _processes_on(words)


def _processes_on(words: list[str]) -> int | None:
    """N of `accelerate launch … --num_processes N …`, or None."""
    if "launch" not in words or not any("accelerate" in word for word in words[: words.index("launch")]):
        return None
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in ("--num_processes", "--num-processes"):
            value = value or (words[place + 1] if place + 1 < len(words) else "")
            return int(value) if value.isdigit() else None
    return None
