"""The command `hf-zero`: look at checkpoints, check them, make model folders of them, and push those to the Hub."""

import importlib.metadata
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import HfApi
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ..checkpoint.format.json_files import read_mapping
from ..checkpoint.format.links import refuse_links
from ..checkpoint.format.manifest import CheckpointError, Manifest
from ..checkpoint.format.text import shown
from ..checkpoint.structure import STATE_NAME
from ..config import ConfigError, parse_bytes
from ..engine.report_tables import mib
from .checkpoints.checkpointing import ZERO_FOLDER
from .checkpoints.foreign import convert as convert_foreign
from .checkpoints.weights import consolidate as consolidate_weights
from .checkpoints.weights import folder_faults, is_checkpoint_of_ours, saved_tensors
from .hub.card import CARD_NAME, write_card
from .hub.card_facts import card_facts, carry_run, log_history
from .hub.hub import Destination, HubError
from .hub.push import push_model

app = typer.Typer(help="Checkpoints of hf_zero.", no_args_is_help=True, add_completion=False)
_console = Console()
_errors = Console(stderr=True, soft_wrap=True)

_LOSSES = {"loss": "training loss", "eval_loss": "evaluation loss"}
_FAULTS_SHOWN = 50
_LONGEST_LINE = 2000

Folder = Annotated[Path, typer.Argument(help="A checkpoint or a model folder.")]


class Dtype(str, Enum):
    """What weights can be written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _tell_version(wanted: bool) -> None:
    if wanted:
        _console.print(f"hf-zero {importlib.metadata.version('hf-zero')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Checkpoints of hf_zero."""


@app.command()
def verify(folder: Folder) -> None:
    """Checksums, every element once, names and shapes against the config's model, no empty tensor. Exits with 1 on a fault."""
    with _said_plainly():
        faults = folder_faults(folder)
    for fault in faults[:_FAULTS_SHOWN]:
        _say_error(f"{folder}: {fault}")
    if len(faults) > _FAULTS_SHOWN:
        _say_error(f"{folder}: and {len(faults) - _FAULTS_SHOWN} more faults")
    if faults:
        raise typer.Exit(1)
    what = "checksums, rows and weights" if is_checkpoint_of_ours(folder) else "weights (no manifest to compare with)"
    _console.print(f"{folder}: good: {what}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def inspect(folder: Folder) -> None:
    """What a checkpoint holds, as a table."""
    with _said_plainly():
        tensors = saved_tensors(folder)
        manifest = Manifest.read(folder / ZERO_FOLDER) if is_checkpoint_of_ours(folder) else None
        reached = list(_reached(folder))
    _console.print(str(folder), markup=False, highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("what")
    table.add_column("value")
    numel = sum(math.prod(tensor.shape) for tensor in tensors)
    dtypes = sorted({tensor.dtype for tensor in tensors})
    rows = [
        ("weights", f"{len(tensors)} tensors, {numel:,} elements, {', '.join(dtypes)}"),
        ("weights bytes", f"{mib(sum(tensor.nbytes for tensor in tensors))} MiB"),
        *reached,
        *(() if manifest is None else _rows_of(manifest)),
    ]
    for what, value in rows:
        table.add_row(what, Text(shown(value, _LONGEST_LINE)))
    _console.print(table)


@app.command()
def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint to read.")],
    out: Annotated[Path, typer.Argument(help="The model folder to write; new or empty.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; the saved one by default.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, such as 5GB.")] = "5GB",
    part: Annotated[list[Path] | None, typer.Option(help="The same checkpoint on another host's disk.")] = None,
    masters: Annotated[bool, typer.Option("--masters", help="The fp32 masters of a run in 16 bits.")] = False,
) -> None:
    """Writes the model of a checkpoint as a folder for from_pretrained, a tensor at a time."""
    with _said_plainly():
        for folder in (checkpoint, *(part or ())):
            faults = folder_faults(folder)
            if faults:
                raise CheckpointError(f"hf_zero: {folder} is not good: {'; '.join(faults[:3])}.")
        with _progress_bar("Writing weights") as show:
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
    _console.print(f"{out}: {', '.join(files)}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a model folder.")],
    repo_id: Annotated[str, typer.Argument(help="Such as my-model or OWNER/my-model; made if not there.")],
    private: Annotated[bool | None, typer.Option(help="Of a repository that is made; the account's default.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, made when it is not there; main by default.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; the saved one by default.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, such as 5GB.")] = "5GB",
) -> None:
    """Uploads the model to the Hub with a model card, and compares what arrived. Takes the token of `hf auth login`."""
    with _said_plainly(), _progress_bar("Writing weights") as show:
        commit = push_model(
            checkpoint,
            Destination(repo_id=repo_id, private=private, revision=revision),
            api=HfApi(library_name="hf_zero"),
            dtype=None if dtype is None else getattr(torch, dtype.value),
            max_shard_bytes=parse_bytes("--max-shard-size", max_shard_size),
            on_progress=show,
        )
    _console.print(str(commit.commit_url), markup=False, highlight=False, soft_wrap=True)


@app.command()
def card(
    folder: Folder,
    name: Annotated[str | None, typer.Option(help="The card's heading; the folder's name by default.")] = None,
) -> None:
    """Writes README.md and loss.png to the folder, from what its files tell. A card of another hand stays."""
    with _said_plainly():
        written = write_card(folder, card_facts(folder), name=name or folder.resolve().name)
        if not written:
            raise CheckpointError(f"hf_zero: {folder / CARD_NAME} is not one of ours and stays as it is.")
    _console.print(str(folder / CARD_NAME), markup=False, highlight=False, soft_wrap=True)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of DeepSpeed ZeRO-1, -2 or -3, or of FSDP (sharded).")],
    out: Annotated[Path, typer.Argument(help="The checkpoint to write; new or empty.")],
    config: Annotated[Path | None, typer.Option(help="Folder with the model's config.json; SOURCE by default.")] = None,
    optimizer: Annotated[str, typer.Option(help="Class of the optimizer, which the source does not record.")] = "AdamW",
) -> None:
    """Makes a checkpoint of hf_zero, weights and optimizer state, of a DeepSpeed or FSDP one. Runs nothing that it holds."""
    with _said_plainly():
        origin = convert_foreign(source, out, config_folder=config, optimizer=optimizer)
    _console.print(f"{out}: {origin}", markup=False, highlight=False, soft_wrap=True)


def _reached(folder: Path) -> Iterator[tuple[str, str]]:
    """How far a Trainer had come, from its own file."""
    path = folder / STATE_NAME
    if path.is_file():
        refuse_links(folder, [path])
        state = read_mapping(path)
        history = log_history(state, path)
        yield "step", str(state.get("global_step"))
        for name, said in _LOSSES.items():
            logged = [entry for entry in history if name in entry]
            if logged:
                yield said, f"{logged[-1][name]:.6g} at step {logged[-1].get('step')}"


def _rows_of(manifest: Manifest) -> list[tuple[str, str]]:
    kinds = sorted({kind for kinds in manifest.kinds.values() for kind in kinds})
    optimizers = ", ".join(optimizer["class"] for optimizer in manifest.optimizers) or "none"
    return [
        ("saved", manifest.written_at),
        ("saved by", f"{manifest.world_size} ranks at stage {manifest.stage}"),
        ("layout", _layout_of(manifest)),
        ("optimizers", f"{optimizers}; state: {', '.join(kinds) or 'none'}"),
        ("trained parameters", f"{len(manifest.shapes)}"),
        ("files", f"{len(manifest.files)}, {mib(sum(record.size for record in manifest.files.values()))} MiB"),
        ("versions", ", ".join(f"{library} {version}" for library, version in manifest.versions.items())),
    ]


def _layout_of(manifest: Manifest) -> str:
    if manifest.weights:
        return "sharded: make a model folder of it with `hf-zero consolidate`"
    return (
        "hf: from_pretrained reads it" if manifest.base is None else f"adapters of a base with checksum {manifest.base}"
    )


@contextmanager
def _progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with bytes done and bytes in all; there is no bar, and so nothing beside an error, before that."""
    progress = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=_errors)
    task = progress.add_task(what, total=None)
    with ExitStack() as stack:

        def show(done: int, total: int) -> None:
            if not progress.live.is_started:
                stack.enter_context(progress)
            progress.update(task, completed=done, total=total)

        yield show


@contextmanager
def _said_plainly() -> Iterator[None]:
    """Turns our own errors, and a disk's, into one line and exit status 1."""
    try:
        yield
    except (CheckpointError, ConfigError, HubError, OSError) as error:
        _say_error(str(error))
        raise typer.Exit(1) from error


def _say_error(said: str) -> None:
    """One line, whatever names out of a file are in it."""
    _errors.print(shown(said, _LONGEST_LINE), markup=False, highlight=False)


def main() -> None:
    app()
