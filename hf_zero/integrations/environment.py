"""What the launcher set up, held against what was asked for: found at the start, said in one paragraph."""

import os

import psutil
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..config import ConfigError


def check_environment(accelerator: Accelerator) -> None:
    """Raises `ConfigError` for a launch that contradicts the engine: another sharder, or fewer ranks than were asked for."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigError(
            f"hf_zero: accelerate runs with distributed_type={kind.value}, which shards by itself; two engines cannot own one "
            "model. Launch without --use_fsdp, --use_deepspeed or --use_megatron_lm, and without the ACCELERATE_USE_FSDP and "
            "ACCELERATE_USE_DEEPSPEED variables, or do without the hf_zero plugin."
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
