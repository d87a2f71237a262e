"""`hf-zero consolidate`: a checkpoint as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.faults import CheckpointError
from ..config import parse_bytes
from .output import Dtype, Json, said_plainly, say, say_error, say_json


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint to read.")],
    out: Annotated[Path, typer.Argument(help="The model folder to write; new or empty.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the weights; default: as saved.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one file.")] = "5GB",
    part: Annotated[
        list[Path] | None, typer.Option(help="The checkpoint's part on another host's disk; repeatable.")
    ] = None,
    masters: Annotated[bool, typer.Option("--masters", help="Write the fp32 masters of a 16-bit run.")] = False,
    as_json: Json = False,
) -> None:
    """Writes a checkpoint's model as a folder for from_pretrained, one tensor at a time."""
    import torch

    from ..integrations.progress_bars import progress_of
    from ..integrations.run_facts import carry_run
    from ..integrations.weights import consolidate as consolidate_weights
    from ..integrations.weights import folder_findings

    with said_plainly():
        # Check before the first byte is written: the new folder has no manifest by which damage could be found later.
        for folder in (checkpoint, *(part or ())):
            with progress_of(f"checking {folder.name}") as show:
                found = folder_findings(folder, show)
            if found.faults:
                raise CheckpointError(f"hf_zero: {folder} has faults: {'; '.join(found.faults[:3])}.")
            if found.edits:
                say_error(found.warning(folder))
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
