"""`hf-zero push`."""

from pathlib import Path
from typing import Annotated

import typer

from ..config import parse_bytes
from .output import Dtype, Json, said_plainly, say, say_json


def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a model folder.")],
    repo_id: Annotated[str, typer.Argument(help="Such as my-model or OWNER/my-model; made if not there.")],
    private: Annotated[bool | None, typer.Option(help="Of a repository that is made; the account's default.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, made when it is not there; main by default.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; the saved one by default.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, such as 5GB.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Uploads the model to the Hub with a model card, and compares what arrived. Takes the token of `hf auth login`."""
    import torch
    from huggingface_hub import HfApi

    from ..integrations.checkpoints.progress import progress_of
    from ..integrations.hub.hub import Destination
    from ..integrations.hub.push import push_model

    with said_plainly(), progress_of("checking") as on_check, progress_of("writing weights") as show:
        commit = push_model(
            checkpoint,
            Destination(repo_id=repo_id, private=private, revision=revision),
            api=HfApi(library_name="hf_zero"),
            dtype=None if dtype is None else getattr(torch, dtype.value),
            max_shard_bytes=parse_bytes("--max-shard-size", max_shard_size),
            on_check=on_check,
            on_progress=show,
        )
    if as_json:
        say_json({"commit_url": str(commit.commit_url), "oid": commit.oid})
    else:
        say(str(commit.commit_url))
