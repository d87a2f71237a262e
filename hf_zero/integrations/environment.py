"""Checks the environment before training: variables, launchers, and the first optimizer step."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.groups import launched_ranks
from ..config import ConfigError, ZeroConfig
from ..config.zero import differences
from .launcher import CONFIG_VARIABLE

# ---- Finds the object under construction, if a hook of accelerate or transformers does not pass it ----


def find_in_callers(wanted: Callable[[Any], bool], *, depth: int = 12) -> Any | None:
    """Returns the nearest `self` among the callers' frames for which `wanted` is true, or None within `depth` frames."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return None
        candidate = frame.f_locals.get("self")
        if candidate is not None and wanted(candidate):
            return candidate
        frame = frame.f_back
    return None


def trainer_in_callers() -> Any | None:
    """Returns the Trainer whose method is running further up the stack, or None."""
    if "transformers.trainer" not in sys.modules:
        # Do not import transformers only for this check: a plain loop may not use transformers, and the import takes seconds.
        return None
    from transformers import Trainer

    # One more frame, for this function itself.
    return find_in_callers(lambda candidate: isinstance(candidate, Trainer), depth=13)


# ---- Detects optimizer steps without the requested engine, at the first step, when set-up is complete ----
#
# torch calls a global hook before the step of any optimizer. There is no other sign of a plugin ignored by accelerate, or of
# HF_ZERO_CONFIG ignored by a script.


class StepWatch:
    """Calls `judge` before each optimizer step, until `judge` returns True or the watch is closed.

    Args:
        judge: called with the optimizer and the engine that steps it, or None; returns True to end the watch.
    """

    def __init__(self, judge: Callable[[torch.optim.Optimizer, object | None], bool]):
        self._judge = judge
        self._is_done = False
        self._handle = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._is_done = True
        self._handle.remove()

    def _look(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        # The hook stays registered when done, because torch is iterating over its hooks at this moment.
        if not self._is_done:
            # Imported here, so importing hf_zero does not import the engine.
            from ..step.sharded_optimizer import engine_stepped_by

            # Mark as done first: if `judge` raises, the user has seen the error, and a notebook may go on.
            self._is_done = True
            self._is_done = self._judge(optimizer, engine_stepped_by(optimizer))


def watch_for_the_variable() -> None:
    """Warns once, on rank 0, if HF_ZERO_CONFIG is set but an optimizer steps without an engine."""
    asked = os.environ[CONFIG_VARIABLE]

    def judge(optimizer: torch.optim.Optimizer, engine: object | None) -> bool:
        # Rank 0 according to the variable RANK, because a script without the engine may have no process group.
        if engine is None and os.environ.get("RANK", "0") == "0":
            print(
                f"hf_zero: {CONFIG_VARIABLE} is {asked!r}, and {type(optimizer).__name__} steps without the engine: nothing is "
                "sharded. The variable is what ZeroPlugin() and ZeroCallback() without arguments read. Give "
                "one of these to the Accelerator or the Trainer, or say `--zero`; or unset the variable.",
                file=sys.stderr,
                flush=True,
            )
        return True

    StepWatch(judge)


# ---- The settings of an unmodified script's run, and what was built with them ----


@dataclass(kw_only=True)
class RunRecord:
    """Shared by all Accelerators of a run.

    Attributes:
        config: the config given to `hf_zero.run --zero`.
        accelerators: number of Accelerators built.
        engines: number of engines built.
        models: number of prepared models, with and without an optimizer.
    """

    config: ZeroConfig
    accelerators: int = 0
    engines: int = 0
    models: int = 0

    def refuse_other(self, config: ZeroConfig) -> None:
        """Raises `ConfigError` if the script itself sets up hf_zero with settings different from the run's."""
        if config != self.config:
            raise ConfigError(
                "hf_zero: two configs for one run: `--zero` of hf_zero.run, and the script's own (its --zero, ZeroPlugin "
                f"or ZeroCallback), have {'; '.join(differences(self.config, config))}. Give one of them, or the "
                "same to both."
            )


# ---- Compares the launcher's set-up with the requested one at the start ----

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
            "hf_zero: CUDA was used before a launcher forked this process, and a fork cannot use CUDA. Restart the notebook; use "
            "no GPU in a cell before the launcher's. ACCELERATE_USE_CPU=true trains on the CPU."
        )
    for variable, (engine, flag, argument) in _SWITCHES.items():
        value = os.environ.get(variable, "")
        if value.lower() in _YES:
            raise ConfigError(
                f"hf_zero: {engine} is asked for as well: {variable} is {value!r}, which `accelerate launch {flag}`, its config "
                f"file, {argument} set. Two engines cannot own one model. Leave that out (and unset {variable}), or do without "
                "hf_zero."
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
                f"hf_zero: {name} is {value}: torch's ring of context parallelism has kernels for accelerators alone, and "
                "accelerate runs it through FSDP2. Leave it at 1, and take sp_size."
            )
        raise ConfigError(
            f"hf_zero: {name} is {value}: accelerate would split the model or its batches itself. Two engines cannot "
            "own one model. Leave it at 1; see `comm.shard_group_size`, and ZeroPlugin(tp_size=...) for tensor "
            "parallel models."
        )


def _refuse_comm_hooks(accelerator: Accelerator) -> None:
    """Raises `ConfigError` for a DDP communication hook, which would change how DDP sends gradients."""
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
    """Raises `ConfigError` if the launch contradicts the engine: another engine, fewer ranks than requested, DDP hooks."""
    # Check the launch first: two engines wrapping one model later fail with errors about neither.
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
            f"hf_zero: {asked} processes were asked for, and accelerate counts {accelerator.num_processes} in each "
            f"of them, so data and state would not be split. On a CPU, {_way_to_ranks_on_the_cpu(asked)}."
        )


def _way_to_ranks_on_the_cpu(ranks: int) -> str:
    """Returns instructions, in words, to start this process as one of several ranks on a CPU."""
    variable, words = "ACCELERATE_USE_CPU", _words_behind_python()
    if os.environ.get("FORK_LAUNCHED", "").lower() in _YES or words[:1] == ["ipykernel_launcher"]:
        return f"set os.environ[{variable!r}] = 'true' in a cell before the launcher's"
    if not words or os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) != str(ranks):
        # There is no script to name, or the launch spans several hosts and needs an address.
        return f"set {variable}=true in the environment of the launcher, on each host"
    return f"`{variable}=true torchrun --nproc_per_node {ranks} {shlex.join(words)}`"


_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Python options whose value is the next word."""


def _words_behind_python() -> list[str]:
    """Returns the script with its arguments, or `-m` and a module with its arguments, from Python's command line.

    Returns [] for code without a file. Reads `sys.orig_argv`, because `hf_zero.run` sets `sys.argv` to the script's own
    arguments.
    """
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m":
            # For a notebook's kernel, only the name.
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
            f"hf_zero: the process group has {dist.get_world_size()} ranks, and this Accelerator, which was there before, counts "
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
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in ("--num_processes", "--num-processes"):
            value = value or (words[place + 1] if place + 1 < len(words) else "")
            return int(value) if value.isdigit() else None
    return None
