"""`hf-zero push`: a model on the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from ..config import parse_bytes
from ..extras import extra
from .output import Dtype, Json, said_plainly, say, say_error, say_json


def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a model folder.")],
    repo_id: Annotated[str, typer.Argument(help="Repository, such as my-model or OWNER/my-model; created if missing.")],
    private: Annotated[
        bool | None, typer.Option(help="Visibility of a new repository; default: the account's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, created if missing; default: main.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the weights; default: as saved.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one file.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Uploads the model to the Hub with a model card, and checks the uploaded files. Uses the token of `hf auth login`."""
    import torch
    from huggingface_hub import HfApi

    from ..integrations.progress_bars import progress_of

    with said_plainly(), progress_of("checking") as on_check, progress_of("writing weights") as show:
        try:
            commit = extra("hub", "push_model")(
                checkpoint,
                extra("hub", "Destination")(repo_id=repo_id, private=private, revision=revision),
                api=HfApi(library_name="hf_zero"),
                dtype=None if dtype is None else getattr(torch, dtype.value),
                max_shard_bytes=parse_bytes("--max-shard-size", max_shard_size),
                on_check=on_check,
                on_progress=show,
            )
        except extra("hub", "HubError") as error:
            say_error(str(error))
            raise typer.Exit(1) from error
    if as_json:
        say_json({"commit_url": str(commit.commit_url), "oid": commit.oid})
    else:
        say(str(commit.commit_url))
