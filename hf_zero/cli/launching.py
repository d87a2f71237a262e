"""Options of `hf-zero run` and `hf-zero parity`, which start ranks."""

from enum import Enum
from typing import Annotated

import typer


class MixedPrecision(str, Enum):
    """The values of mixed precision, as accelerate spells them."""

    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


Script = Annotated[
    list[str], typer.Argument(help="A Python file, or a module's name after -m, and the script's own arguments.")
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")]
Processes = Annotated[int | None, typer.Option(help="Number of ranks; default: one for each GPU, or two on a CPU.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Train on the CPU, even on a machine with GPUs.")]
Precision = Annotated[MixedPrecision | None, typer.Option(help="Precision of autocast.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port on which the ranks meet.")]
SequenceRanks = Annotated[int | None, typer.Option(help="Number of ranks that compute a sequence together (sp_size).")]
