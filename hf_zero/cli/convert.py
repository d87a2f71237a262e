"""`hf-zero convert`: checkpoints of other engines."""

from pathlib import Path
from typing import Annotated

import typer

from ..extras import extra
from .output import Json, said_plainly, say, say_json


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of DeepSpeed ZeRO-1, -2 or -3, or of FSDP (sharded).")],
    out: Annotated[Path, typer.Argument(help="The checkpoint to write; new or empty.")],
    config: Annotated[Path | None, typer.Option(help="Folder with the model's config.json; default: SOURCE.")] = None,
    optimizer: Annotated[
        str, typer.Option(help="Class of the optimizer; the source does not record the class.")
    ] = "AdamW",
    as_json: Json = False,
) -> None:
    """Converts a DeepSpeed or FSDP checkpoint, with optimizer state, to one of hf_zero. Executes nothing from the source."""
    from ..integrations.progress_bars import progress_of

    with said_plainly(), progress_of(f"converting {source.name}") as show:
        origin = extra("foreign", "convert")(source, out, config_folder=config, optimizer=optimizer, on_progress=show)
    if as_json:
        say_json({"folder": out, "source": origin})
    else:
        say(f"{out}: {origin}")
