"""Checks the environment before training: variables, launchers, the first step."""

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

# ---- Finding the object under construction that a hook of accelerate or transformers does not pass ----


def find_in_callers(wanted: Callable[[Any], bool], *, depth: int = 12) -> Any | None:
    """The nearest `self` among the callers' frames for which `wanted` is true, or None within `depth` frames."""
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
    """The Trainer whose method is running further up the stack, or None."""
    if "transformers.trainer" not in sys.modules:
        # Not imported for the question: a plain loop does without transformers, which takes seconds to import.
        return None
    from transformers import Trainer

    # One frame more, which is this function's own.
    return find_in_callers(lambda candidate: isinstance(candidate, Trainer), depth=13)


# ---- Optimizer steps without the engine that was asked for: found at the first of them, when all has been set up ----
#
# torch calls a hook before the step of any optimizer. Nothing else tells that accelerate has left a plugin aside, or that a
# script has read HF_ZERO_CONFIG nowhere.


class StepWatch:
    """Calls `judge` before each step of an optimizer, until `judge` is done or this is closed.

    Args:
        judge: is given the optimizer and the engine that steps it, or None; returns True when it has seen enough.
    """

    def __init__(self, judge: Callable[[torch.optim.Optimizer, object | None], bool]):
        self._judge = judge
        self._is_done = False
        self._handle = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._is_done = True
        self._handle.remove()

    def _look(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        # The hook stays when it is done: torch goes through its hooks at this moment.
        if not self._is_done:
            # Here, not above: what imports hf_zero need not import the engine.
            from ..optimizer.sharded_optimizer import engine_stepped_by

            # What raises has said it; a notebook may go on.
            self._is_done = True
            self._is_done = self._judge(optimizer, engine_stepped_by(optimizer))


def watch_for_the_variable() -> None:
    """Says once, on rank 0, that HF_ZERO_CONFIG is set and an optimizer steps without an engine all the same."""
    asked = os.environ[CONFIG_VARIABLE]

    def judge(optimizer: torch.optim.Optimizer, engine: object | None) -> bool:
        # By the variable RANK: a script that trains without the engine need not have a process group.
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


# ---- The settings of an unmodified script's run, and their use ----


@dataclass(kw_only=True)
class RunRecord:
    """Shared by all Accelerators of a run.

    Attributes:
        config: what `hf_zero.run --zero` was given.
        accelerators: how many were built.
        engines: how many were built.
        models: prepared, with and without an optimizer.
    """

    config: ZeroConfig
    accelerators: int = 0
    engines: int = 0
    models: int = 0

    def refuse_other(self, config: ZeroConfig) -> None:
        """Raises `ConfigError` where the script asks for hf_zero by itself, with other settings than the run."""
        if config != self.config:
            raise ConfigError(
                "hf_zero: two configs for one run: `--zero` of hf_zero.run, and the script's own (its --zero, ZeroPlugin "
                f"or ZeroCallback), have {'; '.join(differences(self.config, config))}. Give one of them, or the "
                "same to both."
            )


# ---- The launcher's set-up against the requested one, compared at the start ----

_SWITCHES = {
    "ACCELERATE_USE_FSDP": ("FSDP", "--use_fsdp", "--fsdp or an fsdp_plugin"),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "--use_deepspeed", "--deepspeed or a deepspeed_plugin"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "--use_megatron_lm", "a megatron_lm_plugin"),
}
_SPLITS = ("DP_SHARD", "CP")
"""What hf_zero cannot be combined with; tensor and sequence parallelism can, and are told to the plugin."""
_PREFIX = "PARALLELISM_CONFIG"
_YES = ("1", "true", "t", "yes", "y", "on")


def refuse_engines_of_the_launch() -> None:
    """Raises `ConfigError` where the launch, or an argument that accelerate has seen, asks for another engine.

    accelerate notes plugins that it is given in the same variables; on a CPU that is all it does with them. A launcher that
    forks ranks behind CUDA's start is refused, too: torch's own error names neither the notebook nor what to do.
    """
    # torch notes a fork behind a mere count of GPUs, also where there are none: a CUDA build on a machine with CPUs only.
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
    """The ranks of a sequence that accelerate's variables ask for, as `hf-zero run --sp` sets them; 1 by default."""
    value = _size_of_launch("SP") if _asks_for_parallelism() else ""
    return int(value) if value.isdigit() else 1


def _asks_for_parallelism() -> bool:
    return os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in _YES


def _size_of_launch(axis: str) -> str:
    return os.environ.get(f"{_PREFIX}_{axis}_SIZE", "1")


def refuse_split_models(parallelism: ParallelismConfig) -> None:
    """Raises `ConfigError` for accelerate's own way to split a model or its batches over ranks."""
    sizes = {f"{axis.lower()}_size": str(getattr(parallelism, f"{axis.lower()}_size", 1)) for axis in _SPLITS}
    _refuse_splits({f"ParallelismConfig.{name}": size for name, size in sizes.items()}, parallelism.sp_size > 1)


def _refuse_splits(sizes: Mapping[str, str], cuts_sequences: bool) -> None:
    for name, value in sizes.items():
        axis = name.rpartition(".")[2].upper().removeprefix(f"{_PREFIX}_")
        # Beside a sequence's ranks accelerate counts the others as shards. ZeRO shards over all of them.
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
    # First the launch: two engines that both wrap the model fail later with errors that name neither.
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
    """Tells in words how this process is started as one of several ranks on a CPU."""
    variable, words = "ACCELERATE_USE_CPU", _words_behind_python()
    if os.environ.get("FORK_LAUNCHED", "").lower() in _YES or words[:1] == ["ipykernel_launcher"]:
        return f"set os.environ[{variable!r}] = 'true' in a cell before the launcher's"
    if not words or os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) != str(ranks):
        # Without a script to name, or on several hosts, whose launch needs an address.
        return f"set {variable}=true in the environment of the launcher, on each host"
    return f"`{variable}=true torchrun --nproc_per_node {ranks} {shlex.join(words)}`"


_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python whose value is the next word."""


def _words_behind_python() -> list[str]:
    """Returns the script with its arguments, or `-m` and a module's, that Python was started with; [] for code without a file.

    Not `sys.argv`, in which a script that `hf_zero.run` runs sees its own arguments only.
    """
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m":
            # Of a notebook's kernel, the name alone.
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
    """Raises `ConfigError` for an Accelerator that was built before a launcher forked this rank."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != accelerator.num_processes:
        raise ConfigError(
            f"hf_zero: the process group has {dist.get_world_size()} ranks, and this Accelerator, which was there before, counts "
            f"{accelerator.num_processes}. Build the Accelerator or Trainer in the function that the launcher calls."
        )


def _ranks_asked_for() -> int | None:
    """Returns the world size of the launcher or its command line; None without a sign of one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    variable, ranks = launched_ranks()
    if variable:
        return ranks
    # For ranks on a CPU, `accelerate launch` may start one plain process without any variable. Its own command line then tells
    # how many were asked for.
    launcher = psutil.Process().parent()
    try:
        words = launcher.cmdline() if launcher is not None else []
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        # A launcher that may not be looked at, or that ended: no sign.
        return None
    return _processes_on(words)


def _processes_on(words: list[str]) -> int | None:
    """N of `accelerate launch … --num_processes N …`, or None."""
    # Other launchers have flags of this name too, and the word accelerate may be an argument of a script.
    names = ("accelerate", "hf_zero.integrations.launcher")
    if "launch" not in words or not any(name in word for word in words[: words.index("launch")] for name in names):
        return None
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in ("--num_processes", "--num-processes"):
            value = value or (words[place + 1] if place + 1 < len(words) else "")
            return int(value) if value.isdigit() else None
    return None
