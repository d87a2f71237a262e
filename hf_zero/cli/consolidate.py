"""`hf-zero consolidate`."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.format.errors import CheckpointError
from ..config import parse_bytes
from .output import Dtype, Json, said_plainly, say, say_json


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint to read.")],
    out: Annotated[Path, typer.Argument(help="The model folder to write; new or empty.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; the saved one by default.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, such as 5GB.")] = "5GB",
    part: Annotated[list[Path] | None, typer.Option(help="The same checkpoint on another host's disk.")] = None,
    masters: Annotated[bool, typer.Option("--masters", help="The fp32 masters of a run in 16 bits.")] = False,
    as_json: Json = False,
) -> None:
    """Writes the model of a checkpoint as a folder for from_pretrained, a tensor at a time."""
    import torch

    from ..integrations.checkpoints.progress import progress_of
    from ..integrations.checkpoints.weights import consolidate as consolidate_weights
    from ..integrations.checkpoints.weights import folder_faults
    from ..integrations.hub.card_facts import carry_run

    with said_plainly():
        for folder in (checkpoint, *(part or ())):
            with progress_of(f"checking {folder.name}") as show:
                faults = folder_faults(folder, show)
            if faults:
                raise CheckpointError(f"hf_zero: {folder} is not good: {'; '.join(faults[:3])}.")
        with progress_of("writing weights") as show:
            files = consolidate_weights(
                checkpoint,
                out,
                others=part or (),
                masters=masters,
                dtype=None if dtype is None else getattr(torch, dtype.value),
                max_shard_bytes=parse_bytes("--max-shard-size", max_shard_size),
                on_progress=show,
            )
        carry_run(checkpoint, out)
    if as_json:
        say_json({"folder": out, "files": files})
    else:
        say(f"{out}: {', '.join(files)}")
