"""What goes to the Hub: the model of a checkpoint or folder, whole, checked, with a card, and nothing of the run."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import CommitInfo, HfApi
from transformers.trainer import TRAINING_ARGS_NAME

from ...checkpoint.foreign.weight_shards import weight_shards_of
from ...checkpoint.format.files import Progress, no_folder, untold
from ...checkpoint.format.links import refuse_links
from ...checkpoint.format.manifest import CheckpointError, Manifest
from ..checkpoints.checkpointing import ZERO_FOLDER
from ..checkpoints.saved_weights import is_checkpoint_of_ours
from ..checkpoints.weights import consolidate, folder_faults, is_of_the_run
from .card import write_card
from .card_facts import card_facts
from .hub import Destination, checked_token, push_folder


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

    The weights of a checkpoint are written anew, as `consolidate` does, and so are a model folder's where `dtype` is given;
    otherwise a folder's files go as they are. All of it is checked before a byte is sent. The folder's own README.md is the
    card, where it has one.

    Args:
        on_check, on_progress: called with bytes checked, and bytes of weights written, and bytes in all.

    Raises:
        CheckpointError: there is no model, or it has faults; nothing was sent then.
        HubError: it did not arrive.
    """
    if not source.is_dir():
        raise CheckpointError(f"hf_zero: {no_folder(source)}.")
    checked_token(to)
    refuse_faults(source, on_progress=on_check)
    with staging_folder(source.resolve().parent) as staged:
        of_a_run = is_checkpoint_of_ours(source) or (source / "trainer_state.json").is_file()
        of_a_run |= bool(weight_shards_of(source))
        if (of_a_run or dtype is not None) and not (source / "adapter_config.json").is_file():
            consolidate(source, staged, dtype=dtype, max_shard_bytes=max_shard_bytes, on_progress=on_progress)
        else:
            stage_model(source, staged)
        refuse_faults(staged, of=source)
        if not (staged / "README.md").is_file():
            write_card(staged, card_facts(source), name=to.repo_id.rpartition("/")[2])
        return push_folder(staged, to, api=api, message="Upload model with hf_zero")


def refuse_faults(folder: Path, *, of: Path | None = None, on_progress: Progress = untold) -> None:
    """Raises `CheckpointError` unless the folder holds a good checkpoint or model. `of` is what the folder was made of."""
    faults = folder_faults(folder, on_progress)
    if faults:
        raise CheckpointError(f"hf_zero: {of or folder} is not good, and nothing was pushed: {'; '.join(faults[:3])}.")


def stage_model(source: Path, out: Path) -> None:
    """Puts the model's files of a checkpoint or an output folder into `out`: nothing of the run, no other checkpoint.

    Weights of a checkpoint never change once they are written, so they are linked, not copied, where the disk can.
    """
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        hidden = any(part.startswith(".") for part in parts)
        of_the_run = parts[0] == ZERO_FOLDER or parts[0].startswith(("checkpoint-", "_")) or is_of_the_run(path.name)
        if path.is_file() and not hidden and not of_the_run:
            refuse_links(source, [path])
            _place(path, out.joinpath(*parts))


def stage_checkpoint(checkpoint: Path, out: Path) -> None:
    """Puts a checkpoint of ours into `out` so that it can be resumed from, but for the pickled training arguments.

    Those may hold `hub_token`, and resuming does not read them; the manifest is written anew without them.
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
            os.link(path.resolve(), target)
            return
        except OSError:
            # A file system without links, or a folder on another one.
            target.unlink(missing_ok=True)
    shutil.copy2(path, target)


@contextmanager
def staging_folder(beside: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, on the disk of `beside` where that can be written to."""
    parent = beside if os.access(beside, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".tmp-push-", dir=parent) as folder:
        yield Path(folder)
