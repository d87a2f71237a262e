"""The `accelerate launch` command that starts the ranks of an unmodified script on this machine."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...config import ConfigError
from .command_line import script_call


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A process to start.

    Attributes:
        command: its words.
        environment: variables to set beside those that there are.
    """

    command: tuple[str, ...]
    environment: dict[str, str]


def launch_of(
    words: Sequence[str],
    *,
    processes: int | None = None,
    cpu: bool = False,
    mixed_precision: str | None = None,
    port: int | None = None,
    module: str = "hf_zero.run",
    options: Sequence[str] = (),
) -> Launch:
    """How to start a script with the engine, on the GPUs of this machine or on its CPU.

    Args:
        words: what follows `-m hf_zero.run`: `--zero 2 script.py --its-own arguments`.
        processes: how many ranks; by default one for each GPU, or one on a CPU.
        cpu: do without the GPUs that there are.
        mixed_precision: `no`, `fp16` or `bf16`; by default what accelerate's own config file says.
        port: where the ranks meet; by default accelerate's.
        module: what each rank runs, with its own `options` before the words.

    Raises:
        ConfigError: the words are not valid, or there are fewer GPUs than ranks.
    """
    script_call(words)
    # A driver that is too old for this torch still counts its GPUs.
    gpus = 0 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    ranks = processes if processes is not None else max(gpus, 1)
    allowed = (
        f"1 to {gpus}, as this machine has {gpus} GPUs, or any number with --cpu" if gpus else "a number from 1 on"
    )
    if ranks < 1 or (gpus and ranks > gpus):
        raise ConfigError(f"hf_zero: --num-processes is {ranks}. It takes {allowed}.")
    flags = ["--num_processes", str(ranks), "--num_machines", "1"]
    if ranks > 1:
        # On a CPU too: accelerate starts a single process by `--cpu`.
        flags.append("--multi_gpu")
    if mixed_precision is not None:
        flags += ["--mixed_precision", mixed_precision]
    if port is not None:
        flags += ["--main_process_port", str(port)]
    # As a module, so that it is the accelerate of this Python.
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    # Without it, each rank on a CPU believes that it is alone.
    environment = {} if gpus else {"ACCELERATE_USE_CPU": "true"}
    return Launch(command=(*accelerate, *flags, "-m", module, *options, *words), environment=environment)
