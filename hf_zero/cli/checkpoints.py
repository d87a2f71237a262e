"""Commands on checkpoint folders: consolidate, convert, inspect, verify, push."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderHook
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..checkpoint.files import CheckpointError, read_mapping, refuse_links, shown
from ..config import ConfigError, parse_bytes
from ..config.checks import spelt
from ..extras import MissingExtraError, extra

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest


# ---- What the commands of `hf-zero` print: lines and tables or one JSON document, errors in one line ----


class _Spelt:
    """Spells out what a terminal obeys in the text of all that a console prints, and leaves the console's own codes."""

    def __init__(self, printed: Any):
        self._printed = printed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._printed, options):
            yield segment if segment.control else Segment(spelt(segment.text), segment.style)


class _SpeltOut(RenderHook):
    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [_Spelt(each) for each in renderables]


console = Console()
_errors = Console(stderr=True, soft_wrap=True)
for each in (console, _errors):
    # Names out of files reach both.
    each.push_render_hook(_SpeltOut())

LONGEST_LINE = 2000
"""Characters of a line that may quote names out of a file."""

Folder = Annotated[Path, typer.Argument(help="A checkpoint or a model folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


class Dtype(str, Enum):
    """The dtypes in which weights can be written."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def say(line: str) -> None:
    """Prints one line on stdout, without wrapping and colours; names out of files cannot break it."""
    # Without markup: rich would take brackets in names out of a file for styles.
    console.print(line.replace("\n", "\\n"), markup=False, highlight=False, soft_wrap=True)


def say_json(document: Any) -> None:
    """Prints a JSON document on stdout; paths become text."""
    # Not by rich, which breaks long lines at the width of the terminal, also within strings.
    # JSON writes all that terminals obey as \uXXXX, but for DEL.
    typer.echo(json.dumps(document, indent=2, default=str).replace("\x7f", "\\u007f"))


def say_error(line: str) -> None:
    """Prints one line on stderr; names out of files cannot break it."""
    _errors.print(shown(line, LONGEST_LINE), markup=False, highlight=False)


@contextmanager
def said_plainly() -> Iterator[None]:
    """Turns our own errors, and a disk's, into one line and exit status 1."""
    try:
        yield
    except (CheckpointError, ConfigError, MissingExtraError, OSError) as error:
        say_error(str(error))
        raise typer.Exit(1) from error


def refuse_special(*paths: Path | None) -> None:
    """Raises `ConfigError` for a link, pipe or device: the file that a command writes would replace it."""
    for path in paths:
        if path is not None and (path.is_symlink() or (path.exists() and not path.is_file())):
            raise ConfigError(f"hf_zero: {path} is a link or no plain file, and is not written to. Name a new file.")


# ---- `hf-zero consolidate` ----


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

    from ..integrations.run_facts import carry_run
    from ..integrations.state_io import progress_of
    from ..integrations.weights import consolidate as consolidate_weights
    from ..integrations.weights import folder_findings

    with said_plainly():
        # Before the first byte is written: the new folder has no manifest that would tell of damaged weights.
        for folder in (checkpoint, *(part or ())):
            with progress_of(f"checking {folder.name}") as show:
                found = folder_findings(folder, show)
            if found.faults:
                raise CheckpointError(f"hf_zero: {folder} is not good: {'; '.join(found.faults[:3])}.")
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


# ---- `hf-zero convert` ----


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
    from ..integrations.state_io import progress_of

    with said_plainly(), progress_of(f"converting {source.name}") as show:
        origin = extra("foreign", "convert")(source, out, config_folder=config, optimizer=optimizer, on_progress=show)
    if as_json:
        say_json({"folder": out, "source": origin})
    else:
        say(f"{out}: {origin}")


# ---- `hf-zero inspect` ----

_LOSSES = {"loss": "training loss", "eval_loss": "evaluation loss"}
_LAYOUTS = {
    "sharded": "sharded: make a model folder of it with `hf-zero consolidate`",
    "hf": "hf: from_pretrained reads it",
    "adapters": "adapters of a base with checksum {base}",
}


def inspect(folder: Folder, as_json: Json = False) -> None:
    """Shows the contents of a checkpoint as a table."""
    with said_plainly():
        facts = _facts(folder)
    if as_json:
        say_json({"folder": folder, **facts})
        return
    say(str(folder))
    table = Table()
    table.add_column("what")
    table.add_column("value")
    for what, value in _rows(facts):
        table.add_row(what, Text(shown(value, LONGEST_LINE)))
    console.print(table)


def _facts(folder: Path) -> dict[str, Any]:
    from ..checkpoint.manifest import Manifest
    from ..integrations.saved_weights import is_checkpoint_of_ours, saved_tensors
    from ..integrations.state_io import ZERO_FOLDER

    tensors = saved_tensors(folder)
    facts: dict[str, Any] = {
        "tensors": len(tensors),
        "elements": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "weights_bytes": sum(tensor.nbytes for tensor in tensors),
        **_reached(folder),
    }
    if is_checkpoint_of_ours(folder):
        facts.update(_saved(Manifest.read(folder / ZERO_FOLDER)))
    return facts


def _reached(folder: Path) -> dict[str, Any]:
    """Reads a Trainer's progress from its own file."""
    from ..checkpoint.structure import STATE_NAME

    path = folder / STATE_NAME
    if not path.is_file():
        return {}
    from ..checkpoint.structure import log_history

    # A folder from the Hub may hold a link to any file of this machine.
    refuse_links(folder, [path])
    state = read_mapping(path)
    history = log_history(state, path)
    facts = {"step": state.get("global_step")}
    for name in _LOSSES:
        logged = [entry for entry in history if name in entry]
        if logged:
            facts[name] = {"value": logged[-1][name], "step": logged[-1].get("step")}
    return facts


def _saved(manifest: "Manifest") -> dict[str, Any]:
    return {
        "saved": manifest.written_at,
        "save": manifest.save,
        "ranks": manifest.world_size,
        "stage": manifest.stage,
        "layout": "sharded" if manifest.weights else "hf" if manifest.base is None else "adapters",
        "base": manifest.base,
        "optimizers": [optimizer["class"] for optimizer in manifest.optimizers],
        "state": sorted({kind for kinds in manifest.kinds.values() for kind in kinds}),
        "trained_parameters": len(manifest.shapes),
        "files": len(manifest.files),
        "files_bytes": sum(record.size for record in manifest.files.values()),
        "versions": manifest.versions,
    }


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from ..engine.report_tables import mib

    yield "weights", f"{facts['tensors']} tensors, {facts['elements']:,} elements, {', '.join(facts['dtypes'])}"
    yield "weights bytes", f"{mib(facts['weights_bytes'])} MiB"
    if "step" in facts:
        yield "step", str(facts["step"])
    for name, said in _LOSSES.items():
        if name in facts:
            yield said, f"{facts[name]['value']:.6g} at step {facts[name]['step']}"
    if "saved" in facts:
        yield "saved", facts["saved"]
        yield "ID of the save", facts["save"] or "none: from before there were IDs"
        yield "saved by", f"{facts['ranks']} ranks at stage {facts['stage']}"
        yield "layout", _LAYOUTS[facts["layout"]].format(base=facts["base"])
        optimizers = ", ".join(facts["optimizers"]) or "none"
        yield "optimizers", f"{optimizers}; state: {', '.join(facts['state']) or 'none'}"
        yield "trained parameters", str(facts["trained_parameters"])
        yield "files", f"{facts['files']}, {mib(facts['files_bytes'])} MiB"
        yield "versions", ", ".join(f"{library} {version}" for library, version in facts["versions"].items())


# ---- `hf-zero verify` ----

_FAULTS_SHOWN = 50


def verify(
    folder: Folder,
    accept: Annotated[
        bool,
        typer.Option("--accept", help="Rewrite the manifest for edited files without tensors of model or optimizer."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Verifies checksums, names and shapes, and that each element is stored once. Exits with 1 on a fault."""
    from ..integrations.saved_weights import is_checkpoint_of_ours
    from ..integrations.state_io import progress_of
    from ..integrations.weights import accept_folder, folder_findings

    with said_plainly():
        with progress_of(f"checking {folder.name}") as show:
            accepted = accept_folder(folder, show) if accept else []
            found = folder_findings(folder, show)
        faults = [*found.faults, *found.edits]
        of_ours = is_checkpoint_of_ours(folder)
    if as_json:
        document = {"folder": folder, "good": not faults, "faults": faults, "has_manifest": of_ours}
        say_json(document | ({"accepted": accepted} if accept else {}))
    else:
        for edit in accepted:
            say(f"{folder}: accepted: {edit}")
        for fault in faults[:_FAULTS_SHOWN]:
            say_error(f"{folder}: {fault}")
        if len(faults) > _FAULTS_SHOWN:
            say_error(f"{folder}: and {len(faults) - _FAULTS_SHOWN} more faults")
        if found.edits and not found.faults:
            say_error(f"{folder}: `hf-zero verify --accept {folder}` accepts these edits, if they were made on purpose")
    if faults:
        raise typer.Exit(1)
    if not as_json:
        what = "checksums, rows and weights" if of_ours else "weights (no manifest to compare with)"
        say(f"{folder}: good: {what}")


# ---- `hf-zero push` ----


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

    from ..integrations.state_io import progress_of

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
