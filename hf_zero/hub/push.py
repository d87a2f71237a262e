"""Pushes one model to the Hub: whole weights, checked, with a card, and without the other files of the run."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import CommitInfo, HfApi
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoint.faults import CheckpointError
from ..checkpoint.files import no_folder, refuse_links
from ..checkpoint.hashes import Progress, untold
from ..checkpoint.manifest import Manifest
from ..checkpoint.origin import weight_shards_of
from ..integrations.run_facts import card_facts
from ..integrations.saved_weights import is_checkpoint_of_ours
from ..integrations.state_io import ZERO_FOLDER
from ..integrations.weights import consolidate, folder_findings, is_of_the_run
from .card import write_card
from .upload import Destination, checked_token, push_folder


def push_model(
    source: Path,
    to: Destination,
    *,
    api: HfApi,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    on_check: Progress = untold,
    on_progress: Progress = untold,
) -> CommitInfo:
    """Pushes the model of a checkpoint, or a model folder.

    The weights of a checkpoint are written again, as `consolidate` does. The weights of a model folder are written again only if
    `dtype` is given; otherwise its files are sent as they are. Everything is checked before the first byte is sent. If the
    folder has its own README.md, that is the card.

    Args:
        on_check, on_progress: called with the bytes checked or the bytes of weights written, and the total bytes.

    Raises:
        CheckpointError: there is no model, or the model has faults. Nothing was sent.
        HubError: the upload failed.
    """
    if not source.is_dir():
        raise CheckpointError(f"hf_zero: {no_folder(source)}.")
    checked_token(to)
    # Before the first byte is sent: otherwise the Hub would keep a damaged model under a good name.
    refuse_faults(source, on_progress=on_check)
    with staging_folder(source.resolve().parent) as staged:
        of_a_run = is_checkpoint_of_ours(source) or (source / "trainer_state.json").is_file()
        of_a_run |= bool(weight_shards_of(source))
        if (of_a_run or dtype is not None) and not (source / "adapter_config.json").is_file():
            consolidate(source, staged, dtype=dtype, max_shard_bytes=max_shard_bytes, on_progress=on_progress)
        else:
            stage_model(source, staged)
        # Check the staged copy as well, because linking or writing may have failed since the first check.
        refuse_faults(staged, of=source)
        if not (staged / "README.md").is_file():
            write_card(staged, card_facts(source), name=to.repo_id.rpartition("/")[2])
        return push_folder(staged, to, api=api, message="Upload model with hf_zero")


def refuse_faults(folder: Path, *, of: Path | None = None, on_progress: Progress = untold) -> None:
    """Raises `CheckpointError` unless the folder contains a good checkpoint or model. `of` names the folder's source."""
    found = folder_findings(folder, on_progress)
    if found.faults:
        raise CheckpointError(
            f"hf_zero: {of or folder} has faults, so nothing was pushed: {'; '.join(found.faults[:3])}."
        )
    if found.edits:
        raise CheckpointError(
            f"hf_zero: {of or folder} was edited after its save, so nothing was pushed: {'; '.join(found.edits[:3])}. If the "
            f"edits are yours, run `hf-zero verify --accept {of or folder}` and push again."
        )


def stage_model(source: Path, out: Path) -> None:
    """Puts the model files of a checkpoint or an output folder into `out`, without files of the run and other checkpoints."""
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        hidden = any(part.startswith(".") for part in parts)
        of_the_run = parts[0] == ZERO_FOLDER or parts[0].startswith(("checkpoint-", "_")) or is_of_the_run(path.name)
        if path.is_file() and not hidden and not of_the_run:
            refuse_links(source, [path])
            _place(path, out.joinpath(*parts))


def stage_checkpoint(checkpoint: Path, out: Path) -> None:
    """Copies an hf_zero checkpoint into `out` for resuming, without the pickled training arguments.

    The training arguments may contain `hub_token`, and resuming does not read them. The manifest is rewritten without them.
    """
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != TRAINING_ARGS_NAME:
            refuse_links(checkpoint, [path])
            _place(path, out / path.relative_to(checkpoint))
    manifest = Manifest.read(checkpoint / ZERO_FOLDER)
    files = {name: record for name, record in manifest.files.items() if Path(name).name != TRAINING_ARGS_NAME}
    manifest.with_files(files).write(out / ZERO_FOLDER)


def _place(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        try:
            # Link instead of copy, because the weights of a checkpoint never change.
            os.link(path.resolve(), target)
            return
        except OSError:
            # The file system has no links, or the target is on another file system.
            target.unlink(missing_ok=True)
    shutil.copy2(path, target)


@contextmanager
def staging_folder(next_to: Path) -> Iterator[Path]:
    """Yields a temporary folder, on the disk of `next_to` if possible, else in the system's folder for temporary files."""
    parent = next_to if os.access(next_to, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".tmp-push-", dir=parent) as folder:
        yield Path(folder)
