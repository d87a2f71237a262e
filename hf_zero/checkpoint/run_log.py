"""Reads the log and the position of a run from a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from .faults import CheckpointError, shown
from .json_files import read_mapping

STATE_NAME = "trainer_state.json"
POSITION_NAME = "data_position.json"
RUN_NAME = "training_run.json"
"""Settings, set-up and hardware of the run that trained the model, for its model card. No paths, no secrets."""

RUN_FIELDS = ("arguments", "zero", "data", "hardware", "versions")
_NUMBERS = ("loss", "eval_loss", "step", "epoch", "zero/peak_mib")
"""The fields of Trainer's log entries that are used in calculations."""


def read_run(folder: Path) -> dict[str, Any]:
    """Reads a folder's record of the training run; {} without one. The fields in `RUN_FIELDS` are mappings.

    Raises:
        CheckpointError: the file cannot be read, or its content has another form.
    """
    path = folder / RUN_NAME
    run = read_mapping(path) if path.is_file() else {}
    for name in RUN_FIELDS:
        if not isinstance(run.get(name) or {}, dict):
            raise CheckpointError(f"hf_zero: {path}: {name} is a {type(run[name]).__name__}; expected: a mapping.")
    return {**run, **{name: run.get(name) or {} for name in RUN_FIELDS}} if run else {}


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Reads a Trainer's log from the trainer state in the folder, or from the run record of a model folder; see `log_history`."""
    path = folder / STATE_NAME
    return log_history(read_mapping(path), path) if path.is_file() else log_history(read_run(folder), folder / RUN_NAME)


_LAST_STEP = 2**53
_LEAST, _MOST = 1e-150, 1e150


def log_history(state: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Returns the log entries of a Trainer's state, in order. The fields in `_NUMBERS` are numbers.

    Raises:
        CheckpointError: the log is no list of mappings, or such a field is no number; `path` is the state's file, for the error.
    """
    history = state.get("log_history") or []
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise CheckpointError(f"hf_zero: {path}: log_history is not a list of mappings.")
    for entry in history:
        wrong = [name for name, value in entry.items() if name in _NUMBERS and not is_number(value)]
        if wrong:
            raise CheckpointError(f"hf_zero: {path}: log_history has a {wrong[0]} that is not a number.")
    return history


def is_number(value: object) -> bool:
    """Whether a JSON value is a number in the range of a float."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def is_finite(value: object) -> bool:
    """Whether a value is 0 or from 1e-150 to 1e150 in magnitude: sums, differences and ratios of such values are finite."""
    return is_number(value) and (value == 0 or _LEAST <= abs(value) <= _MOST)  # type: ignore[arg-type]  # it is a number


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value is a step count of at most 2**53. Beyond 2**53, consecutive steps are equal as floats."""
    return type(value) is int and 0 <= value <= _LAST_STEP


def read_position(folder: Path) -> dict[str, int] | None:
    """Reads the position of training in its data: `global_rows`, `epoch` and `rows`; None without a record.

    Raises:
        CheckpointError: the file has other fields or values.
    """
    path = folder / POSITION_NAME
    if not path.is_file():
        return None
    content = read_mapping(path)
    known = {"global_rows", "epoch", "rows"}
    if content.keys() != known or not all(type(value) is int and value >= 0 for value in content.values()):
        raise CheckpointError(
            f"hf_zero: {path} holds {shown(str(content))}; expected: whole numbers for {', '.join(sorted(known))}. Resume from "
            "an earlier checkpoint."
        )
    return content
