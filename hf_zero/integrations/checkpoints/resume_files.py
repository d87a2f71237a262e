"""What is wrong with the files of a checkpoint that transformers and torch read as a Trainer resumes, beside weights and rows."""

import dataclasses
import fnmatch
from pathlib import Path
from zipfile import is_zipfile

import torch
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from ...checkpoint.format.errors import CheckpointError
from ...checkpoint.format.json_files import read_mapping
from ...checkpoint.format.text import shown
from ...checkpoint.structure import STATE_NAME, read_position
from ...checkpoint.verify import in_words

_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "global_step": int,
    "epoch": (*_NUMBER, type(None)),
    "max_steps": int,
    "num_train_epochs": _NUMBER,
    "logging_steps": _NUMBER,
    "eval_steps": _NUMBER,
    "save_steps": _NUMBER,
    "train_batch_size": int,
    "num_input_tokens_seen": _NUMBER,
    "total_flos": _NUMBER,
    "best_metric": (*_NUMBER, type(None)),
    "best_global_step": (int, type(None)),
    "best_model_checkpoint": (str, type(None)),
    "trial_name": (str, type(None)),
    "stateful_callbacks": (dict, type(None)),
    "log_history": (list, type(None)),
}
"""Fields of a Trainer's state, and what they may be."""
_NEEDED = ("train_batch_size",)
"""Fields that a Trainer calculates with as it resumes, and that are None where its file lacks them."""

_PICKLED: dict[str, tuple[str, ...]] = {
    "scheduler.pt": (),
    "scaler.pt": (),
    "optimizer.pt": (),
    "rng_state*.pth": ("python", "numpy", "cpu"),
}
"""Names of files that `torch.load` reads, and what the mapping in each has at least."""


def resume_faults(checkpoint: Path) -> list[str]:
    """What a Trainer could not go on with in a checkpoint: its own state, its place in the data, and what `torch.load` reads."""
    faults = state_faults(checkpoint)
    try:
        read_position(checkpoint)
    except CheckpointError as error:
        faults.append(in_words(error))
    for path in sorted(checkpoint.iterdir()):
        wanted = next((keys for name, keys in _PICKLED.items() if fnmatch.fnmatchcase(path.name, name)), None)
        if wanted is not None and not _is_loaded(path, wanted):
            faults.append(f"{path.name} is cut off or damaged, or holds what no Trainer writes there")
    return faults


def _is_loaded(path: Path, wanted: tuple[str, ...]) -> bool:
    try:
        with safe_globals():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception:
        # Of a pickle that is none, each reader has errors of its own.
        return False
    return isinstance(content, dict) and all(name in content for name in wanted)


def state_faults(checkpoint: Path) -> list[str]:
    """What a Trainer could not go on with in its own state of a checkpoint."""
    path = checkpoint / STATE_NAME
    if not path.is_file():
        return [f"{STATE_NAME} is missing, so it is no checkpoint of a Trainer"]
    try:
        content = read_mapping(path)
    except CheckpointError as error:
        return [in_words(error)]
    known = {field.name for field in dataclasses.fields(TrainerState)}
    faults = [f"{STATE_NAME} has {name!r}, which Trainer does not know" for name in content if name not in known]
    faults += [f"{STATE_NAME} lacks {name}, which every Trainer writes" for name in _NEEDED if name not in content]
    for name, kinds in _KINDS.items():
        value = content.get(name)
        if name in content and (not isinstance(value, kinds) or (type(value) is int and not 0 <= value < 2**63)):
            faults.append(f"{name} in {STATE_NAME} is {shown(repr(value), 80)}, which no Trainer writes")
    return faults
