"""Compares the launcher's set-up with the requested one before training."""

import os
import shlex
import sys
from collections.abc import Mapping

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType, DistributedType

from ..comm.groups import launched_ranks
from ..config import ConfigError

_SWITCHES = {
    "ACCELERATE_USE_FSDP": ("FSDP", "--use_fsdp", "--fsdp or an fsdp_plugin"),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "--use_deepspeed", "--deepspeed or a deepspeed_plugin"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "--use_megatron_lm", "a megatron_lm_plugin"),
}

_SPLITS = ("DP_SHARD", "CP")
"""Axes that hf_zero does not support. Tensor and sequence parallelism are supported, as settings of the plugin."""

_PREFIX = "PARALLELISM_CONFIG"

_YES = ("1", "true", "t", "yes", "y", "on")


def refuse_engines_of_the_launch() -> None:
    """Raises `ConfigError` if the launch, or an argument passed to accelerate, requests another engine.

    accelerate notes its plugins in the same environment variables; on a CPU it does nothing else with them. Also refuses ranks
    forked after CUDA was initialized: torch's own error mentions neither the notebook nor the remedy.
    """
    # torch notes a fork even after merely counting GPUs, also if there are none (a CUDA build on a machine with CPUs only).
    if (
        torch.cuda._is_in_bad_fork()
        and torch.cuda.device_count()
        and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in _YES
    ):
        raise ConfigError(
            "hf_zero: CUDA was used before a launcher forked this process, and a forked process cannot use CUDA. Restart the "
            "notebook, and use no GPU in the cells before the launcher's. ACCELERATE_USE_CPU=true trains on the CPU."
        )
    for variable, (engine, flag, argument) in _SWITCHES.items():
        value = os.environ.get(variable, "")
        if value.lower() in _YES:
            raise ConfigError(
                f"hf_zero: {engine} is also requested: {variable} is {value!r}, which is set by `accelerate launch {flag}`, its "
                f"config file, {argument}. Two engines cannot own one model. Remove that setting (and unset {variable}), or run "
                "without hf_zero."
            )
    if _asks_for_parallelism():
        sizes = {f"{_PREFIX}_{axis}_SIZE": _size_of_launch(axis) for axis in (*_SPLITS, "TP")}
        _refuse_splits(sizes, cuts_sequences=sp_size_of_launch() > 1)


def sp_size_of_launch() -> int:
    """Returns the sequence-parallel size in accelerate's variables, as set by `hf-zero run --sp`; 1 by default."""
    value = _size_of_launch("SP") if _asks_for_parallelism() else ""
    return int(value) if value.isdigit() else 1


def _asks_for_parallelism() -> bool:
    return os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in _YES


def _size_of_launch(axis: str) -> str:
    return os.environ.get(f"{_PREFIX}_{axis}_SIZE", "1")


def refuse_split_models(parallelism: ParallelismConfig) -> None:
    """Raises `ConfigError` if accelerate itself is set to split a model or its batches over ranks."""
    sizes = {f"{axis.lower()}_size": str(getattr(parallelism, f"{axis.lower()}_size", 1)) for axis in _SPLITS}
    _refuse_splits({f"ParallelismConfig.{name}": size for name, size in sizes.items()}, parallelism.sp_size > 1)


def _refuse_splits(sizes: Mapping[str, str], cuts_sequences: bool) -> None:
    for name, value in sizes.items():
        axis = name.rpartition(".")[2].upper().removeprefix(f"{_PREFIX}_")
        # With sequence parallelism, accelerate counts the remaining ranks as shards; ZeRO shards over all ranks.
        if value in ("", "1", "None") or (axis == "DP_SHARD_SIZE" and cuts_sequences):
            continue
        if axis == "CP_SIZE":
            raise ConfigError(
                f"hf_zero: {name} is {value}: torch's ring attention for context parallelism has kernels for accelerators "
                "only, and accelerate runs it through FSDP2. Set it to 1, and use sp_size."
            )
        raise ConfigError(
            f"hf_zero: {name} is {value}: accelerate would split the model or its batches itself. Two engines cannot "
            "own one model. Set it to 1; see `comm.shard_group_size`, and ZeroPlugin(tp_size=...) for tensor "
            "parallel models."
        )


def _refuse_comm_hooks(accelerator: Accelerator) -> None:
    """Raises `ConfigError` for a DDP communication hook, which would change how DDP sends gradients."""
    asked = accelerator.ddp_handler
    for field in ("comm_hook", "comm_wrapper") if asked is not None else ():
        hook = DDPCommunicationHookType(getattr(asked, field))
        if hook is not DDPCommunicationHookType.NO:
            raise ConfigError(
                f"hf_zero: DistributedDataParallelKwargs has {field}={hook.value}, a hook of DDP, but hf_zero reduces gradients "
                "instead of DDP. Remove it. `reduce_dtype: bfloat16` or float16 sends gradients in 16 bits, and "
                "`comm.gradients: int8` in 8."
            )


def check_environment(accelerator: Accelerator) -> None:
    """Raises `ConfigError` if the launch contradicts the engine: another engine, fewer ranks than requested, DDP hooks."""
    # Check the launch first: two engines wrapping one model later fail with errors about neither.
    refuse_engines_of_the_launch()
    _refuse_comm_hooks(accelerator)
    if accelerator.parallelism_config is not None:
        refuse_split_models(accelerator.parallelism_config)
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigError(
            f"hf_zero: accelerate runs with distributed_type={kind.value}, which shards the model itself. Two engines cannot own "
            "one model. Launch without --use_fsdp, --use_deepspeed, --use_megatron_lm and their plugins, or run without hf_zero."
        )
    asked = _ranks_asked_for()
    if asked is not None and asked != accelerator.num_processes:
        raise ConfigError(
            f"hf_zero: {asked} processes were requested, but accelerate counts {accelerator.num_processes} in each "
            f"of them, so data and state would not be split. On a CPU, {_way_to_ranks_on_the_cpu(asked)}."
        )


def _way_to_ranks_on_the_cpu(ranks: int) -> str:
    """Returns instructions, in words, to start this process as one of several ranks on a CPU."""
    variable, words = "ACCELERATE_USE_CPU", _words_after_python()
    if os.environ.get("FORK_LAUNCHED", "").lower() in _YES or words[:1] == ["ipykernel_launcher"]:
        return f"set os.environ[{variable!r}] = 'true' in a cell before the launcher's"
    if not words or os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) != str(ranks):
        # There is no script to name, or the launch spans several hosts and needs an address.
        return f"set {variable}=true in the environment of the launcher, on each host"
    return f"`{variable}=true torchrun --nproc_per_node {ranks} {shlex.join(words)}`"


_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Python options whose value is the next word."""


def _words_after_python() -> list[str]:
    """Returns the script with its arguments, or `-m` and a module with its arguments, from Python's command line.

    Returns [] for code without a file. Reads `sys.orig_argv`, because `hf_zero.run` sets `sys.argv` to the script's own
    arguments.
    """
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m":
            # Omit the arguments of a notebook's kernel.
            named = list(words)
            return named[:1] if named[:1] == ["ipykernel_launcher"] else [word, *named]
        if word == "-c" or "--multiprocessing-fork" in sys.orig_argv:
            return []
        if word in _WITH_A_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return [word, *words]
    return []


def refuse_earlier_accelerator(accelerator: Accelerator) -> None:
    """Raises `ConfigError` for an Accelerator built before a launcher forked this rank."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != accelerator.num_processes:
        raise ConfigError(
            f"hf_zero: the process group has {dist.get_world_size()} ranks, but this Accelerator was built before it and counts "
            f"{accelerator.num_processes}. Build the Accelerator or Trainer in the function that the launcher calls."
        )


def _ranks_asked_for() -> int | None:
    """Returns the world size requested from the launcher; None if unknown."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    variable, ranks = launched_ranks()
    if variable:
        return ranks
    # For ranks on a CPU, `accelerate launch` may start one plain process without environment variables. Only its command line
    # then shows the requested number of processes.
    launcher = psutil.Process().parent()
    try:
        words = launcher.cmdline() if launcher is not None else []
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        # The launcher has ended or may not be inspected.
        return None
    return _processes_on(words)


def _processes_on(words: list[str]) -> int | None:
    """Returns N from `accelerate launch … --num_processes N …`, or None."""
    # Check the program too, because other launchers have this flag, and `accelerate` may be an argument of a script.
    names = ("accelerate", "hf_zero.integrations.launcher")
    if "launch" not in words or not any(name in word for word in words[: words.index("launch")] for name in names):
        return None
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in ("--num_processes", "--num-processes"):
            value = value or (words[index + 1] if index + 1 < len(words) else "")
            return int(value) if value.isdigit() else None
    return None
