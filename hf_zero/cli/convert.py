"""`hf-zero convert`."""

from pathlib import Path
from typing import Annotated

import typer

from .output import Json, said_plainly, say, say_json


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of DeepSpeed ZeRO-1, -2 or -3, or of FSDP (sharded).")],
    out: Annotated[Path, typer.Argument(help="The checkpoint to write; new or empty.")],
    config: Annotated[Path | None, typer.Option(help="Folder with the model's config.json; SOURCE by default.")] = None,
    optimizer: Annotated[str, typer.Option(help="Class of the optimizer, which the source does not record.")] = "AdamW",
    as_json: Json = False,
) -> None:
    """Makes a checkpoint of hf_zero, weights and optimizer state, of a DeepSpeed or FSDP one. Runs nothing that it holds."""
    from ..integrations.checkpoints.foreign import convert as convert_foreign
    from ..integrations.checkpoints.progress import progress_of

    with said_plainly(), progress_of(f"converting {source.name}") as show:
        origin = convert_foreign(source, out, config_folder=config, optimizer=optimizer, on_progress=show)
    if as_json:
        say_json({"folder": out, "source": origin})
    else:
        say(f"{out}: {origin}")
