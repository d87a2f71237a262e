"""Reads the optimizer file of a plain Trainer run into an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.faults import CheckpointError, read_fault
from ..checkpoint.torch_files import load_tensors
from ..engine.state import EngineState
from ..layout.intervals import Interval
from .state_io import SavedOptimizers, refuse_other_state

_TELLING = (
    *("betas", "momentum", "momentum_decay", "alpha", "rho", "lr_decay", "etas"),
    *("clip_threshold", "beta2_decay", "ns_steps"),
)
"""Settings that distinguish kinds of optimizers."""


@contextmanager
def open_plain(file: Path, engine_state: EngineState) -> Iterator[SavedOptimizers]:
    """Opens the whole optimizer state written by Trainer without hf_zero (`optimizer.pt`), for `load_state`.

    The file is memory-mapped, so a rank reads only the bytes of its own shards.

    Raises:
        CheckpointError: the optimizer, its groups or the parameters' sizes are different.
    """
    try:
        saved = load_tensors(file)
    except Exception as error:
        raise CheckpointError(f"hf_zero: {file} {read_fault(error)}. Resume from another checkpoint.") from error
    [(optimizer, group_names)] = engine_state.groups()
    indices = [list(group["params"]) for group in saved["param_groups"]]
    if [len(group) for group in indices] != [len(names) for names in group_names]:
        raise CheckpointError(
            f"hf_zero: {file} has groups of {[len(group) for group in indices]} parameters, but the optimizer has groups of "
            f"{[len(names) for names in group_names]}. Resume with the settings that the checkpoint was made with."
        )
    for group, theirs in zip(optimizer.param_groups, saved["param_groups"]):
        _refuse_other_optimizer(type(optimizer).__name__, group, theirs, file)
    state: dict[str, dict[str, Any]] = {}
    for names, numbers in zip(group_names, indices):
        for name, number in zip(names, numbers):
            state[name] = saved["state"].get(number, {})
    shapes = engine_state.shapes()
    elementwise = {
        name: [k for k, v in values.items() if torch.is_tensor(v) and v.dim() > 0 and tuple(v.shape) == shapes[name]]
        for name, values in state.items()
    }
    for name, values in state.items():
        for kind, value in values.items():
            # Factors of rows or columns (Adafactor) have only some of the parameter's dimensions.
            if torch.is_tensor(value) and not {1, *shapes[name]}.issuperset(value.shape):
                raise CheckpointError(
                    f"hf_zero: {file}: {kind} of {name!r} has shape {tuple(value.shape)}, but the parameter has {shapes[name]}. "
                    "Resume with the model that the checkpoint was made with."
                )

    for group, names, theirs in zip(optimizer.param_groups, group_names, saved["param_groups"]):
        taken = {key: value for key, value in theirs.items() if key != "params"}
        # Checking one matrix per group suffices, because a group has one optimizer and one set of settings.
        for name in [name for name in names if len(shapes[name]) == 2][:1]:
            refuse_other_state(file, optimizer, group, taken, state[name])

    def read(kind: str, name: str, interval: Interval) -> torch.Tensor:
        return state[name][kind].reshape(-1)[interval.start : interval.stop].clone()

    def scalars_of(name: str) -> dict[str, Any]:
        return {kind: _own(value) for kind, value in state[name].items() if kind not in elementwise[name]}

    yield SavedOptimizers(
        settings=[
            (group, {key: value for key, value in saved_group.items() if key != "params"})
            for group, saved_group in zip(optimizer.param_groups, saved["param_groups"])
        ],
        read=read,
        kinds_of=lambda name: elementwise[name],
        scalars_of=scalars_of,
        own_values=[(optimizer, {k: v for k, v in saved.items() if k not in ("state", "param_groups")})],
        origin="plain Trainer",
    )


def _refuse_other_optimizer(kind: str, group: dict[str, Any], saved: dict[str, Any], file: Path) -> None:
    """Compares the settings, because the file does not name the class: Adam has betas, SGD has momentum."""
    for setting in _TELLING:
        if (setting in saved) != (setting in group):
            has, here = ("has", "does not have") if setting in saved else ("does not have", "has")
            raise CheckpointError(
                f"hf_zero: {file} was saved with an optimizer that {has} the setting {setting!r}, which this run's {kind} "
                f"{here}. Resume with the same optimizer, or start afresh from the saved model."
            )


def _own(value: Any) -> Any:
    # Cloned, because a view of the mapped file would keep the whole file open.
    return value.clone() if torch.is_tensor(value) else value
