"""What the launcher set up, held against what was asked for: found at the start, said in one paragraph."""

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..config import ConfigError

_ONE_DEVICE_A_RANK = (DistributedType.NO, DistributedType.MULTI_CPU)


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
            f"hf_zero: {asked} processes were asked for and {accelerator.num_processes} is running, so nothing would be "
            "sharded. `accelerate launch --cpu --num_processes N` starts a single process: for N ranks on CPU use "
            "`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N --num_machines 1 script.py`, the "
            "config configs/accelerate/cpu2.yaml, or `torchrun --nproc_per_node N script.py`."
        )


def _ranks_asked_for() -> int | None:
    """The number of processes on the command line of the `accelerate launch` that is our parent, if there is one."""
    import psutil

    launcher = psutil.Process().parent()
    if launcher is None or "WORLD_SIZE" in os.environ:
        return None
    try:
        words = launcher.cmdline()
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return None
    if not any("accelerate" in word for word in words[:4]) or "launch" not in words:
        return None
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in ("--num_processes", "--num-processes"):
            value = value or words[place + 1]
            return int(value) if value.isdigit() else None
    return None
