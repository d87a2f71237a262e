"""An engine's state into a checkpoint folder and back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.folder.commit import seal
from ...checkpoint.folder.disks import Disk
from ...checkpoint.format.manifest import CheckpointError, Manifest
from ...checkpoint.format.pieces import Piece
from ...checkpoint.format.settings import plain_settings, same_groups, tell_apart
from ...checkpoint.reader import CheckpointReader
from ...checkpoint.verify import checkpoint_faults
from ...checkpoint.writer import Row, plan_rows, write_pieces
from ...comm.all_or_none import Exchange
from ...engine.engine import ZeroEngine
from ...engine.engine_state import EngineState, SavedState
from .load_state import SavedOptimizers, load_state
from .progress import progress_bar, progress_of

ZERO_FOLDER = "zero"


def write_state(engine: ZeroEngine, folder: str | Path) -> Manifest:
    """Writes masters and optimizer state to `folder`, every rank its own rows; returns the manifest to seal. Collective.

    Of a model that is split over ranks it writes the weights too.
    """
    if engine.state.is_split:
        # Here, not above: it needs transformers' Trainer, which takes seconds to import.
        from .split_weights import weight_rows

        model = weight_rows(engine)
        manifest, pieces = plan_state(engine, folder, weights=model.rows)
        manifest = replace(manifest, weights=dict(model.weights))
    else:
        manifest, pieces = plan_state(engine, folder)
    nbytes = sum(piece.nbytes for piece in pieces)
    with progress_bar("writing optimizer state", nbytes, is_main=engine.world_groups.rank == 0) as show:
        write_pieces(pieces, Path(folder), engine.world.exchange, show)
    return manifest


def plan_state(
    engine: ZeroEngine, folder: str | Path, *, with_state: bool = True, weights: Sequence[Row] = ()
) -> tuple[Manifest, list[Piece]]:
    """Makes the files of masters and optimizer state; returns the manifest to seal and this rank's part. Collective.

    Args:
        with_state: False writes none, for a checkpoint of the model alone.
        weights: this rank's rows of the model itself.
    """
    groups = engine.world_groups
    saved = engine.state.to_save() if with_state else SavedState()
    own_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for row in saved.rows:
        if row.own_shape is not None:
            own_shapes.setdefault(row.name, {})[row.kind] = row.own_shape
    return plan_rows(
        Path(folder),
        rank=groups.rank,
        world_size=groups.world_size,
        stage=engine.config.stage,
        rows=[*weights, *((row.kind, row.name, row.interval, row.tensor) for row in saved.rows)],
        shapes=engine.state.shapes(),
        scalars=saved.scalars,
        optimizers=lambda: [_described(optimizer, group_names) for optimizer, group_names in saved.groups],
        exchange=engine.world.exchange,
        own_shapes=own_shapes,
        boxes=engine.state.boxes(),
    )


def _described(optimizer: torch.optim.Optimizer, group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """An optimizer's class and its groups.

    Raises:
        CheckpointError: it has settings, or state beside that of its parameters, which cannot be saved.
    """
    name, loose = type(optimizer).__name__, [key for key in optimizer.state if not torch.is_tensor(key)]
    if loose:
        raise CheckpointError(
            f"hf_zero: {name} keeps state of no parameter, under {loose[0]!r}, and only that of parameters is saved. Keep it in "
            "`param_groups`, whose settings are saved too, or train without checkpoints."
        )
    return {
        "class": name,
        "groups": [
            {"settings": plain_settings(group), "parameters": list(names)}
            for group, names in zip(optimizer.param_groups, group_names)
        ],
    }


def seal_state(
    engine: ZeroEngine,
    root: Path,
    manifest: Manifest,
    *,
    folder: str = ZERO_FOLDER,
    within: str = "",
    disk: Disk | None = None,
    exchange: Exchange | None = None,
) -> None:
    """Writes the manifest, which makes `root` a finished checkpoint. Collective, by `exchange` or the engine's own.

    Args:
        disk: that `root` is on; by default one that all ranks see.
    """
    groups = engine.world_groups
    disk = disk or Disk.shared(groups.rank, groups.world_size)
    seal(root, manifest, folder=folder, within=within, disk=disk, exchange=exchange or engine.world.exchange)


def state_bytes(engine: ZeroEngine, disk: Disk) -> int:
    """About what a checkpoint of this engine takes on a disk: whole weights, and the state of the ranks there. Collective."""
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    states = engine.world.exchange(sum(row.tensor.nbytes for row in engine.state.rows_to_save()))
    return weights + sum(states[rank] for rank in disk.ranks)


def refuse_faults(engine: ZeroEngine, root: Path, folder: str) -> None:
    """Raises `CheckpointError` on every rank unless the checkpoint is whole and as it was written. Collective."""
    groups = engine.world_groups
    with progress_of(f"checking {root.name}", is_main=groups.rank == 0) as show:
        mine = checkpoint_faults(root, folder, rank=groups.rank, world_size=groups.world_size, on_progress=show)
    faults = list(dict.fromkeys(fault for theirs in engine.world.exchange(mine) for fault in theirs))
    if faults:
        raise CheckpointError(
            f"hf_zero: {root} cannot be resumed from: {'; '.join(faults[:5])}. Nothing was trained; resume from another "
            "checkpoint."
        )


def load_engine(engine: ZeroEngine, folder: str | Path) -> None:
    """Replaces masters and optimizer state by those of one of our checkpoints, see `load_state`. Collective."""
    load_state(engine, Path(folder), open_own)


@contextmanager
def open_own(folder: Path, state: EngineState) -> Iterator[SavedOptimizers]:
    """The `zero/` folder of one of our checkpoints, for `load_state`."""
    with CheckpointReader(folder) as reader:
        reader.check_names(state.shapes())
        settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for (optimizer, names), saved in zip(state.groups(), _saved_optimizers(state, reader, folder)):
            if not same_groups(saved["groups"], names):
                raise CheckpointError(
                    f"hf_zero: {folder}: the parameter groups of {saved['class']} hold other parameters than the "
                    "optimizer's now. Resume with the weight-decay and group settings that the checkpoint was made with."
                )
            for group, its in zip(optimizer.param_groups, saved["groups"]):
                _refuse_namesake(saved["class"], its["settings"], group, folder)
            settings.extend(zip(optimizer.param_groups, (group["settings"] for group in saved["groups"])))
        yield SavedOptimizers(
            settings=settings, read=reader.read, kinds_of=reader.kinds_of, scalars_of=reader.scalars_of
        )


def _refuse_namesake(name: str, saved: dict[str, Any], group: dict[str, Any], folder: Path) -> None:
    """Raises `CheckpointError` where two optimizers are called alike, as transformers' and torch's Adafactor, and are not."""
    differing = tell_apart(saved, group)
    if differing is not None:
        there, here = differing
        raise CheckpointError(
            f"hf_zero: {folder} was made with another optimizer that is called {name}: it has the setting {there!r}, which this "
            f"run's has not, and this run's has {here!r}. Resume with the optimizer of the same package, or start afresh from "
            "the saved model."
        )


def _saved_optimizers(state: EngineState, reader: CheckpointReader, folder: Path) -> tuple[dict[str, Any], ...]:
    saved = reader.manifest.optimizers
    there = [optimizer["class"] for optimizer in saved]
    here = [type(optimizer).__name__ for optimizer, _ in state.groups()]
    if there != here:
        raise CheckpointError(
            f"hf_zero: {folder} was made with the optimizer {', '.join(there) or 'none'}, and this run has "
            f"{', '.join(here) or 'none'}. Resume with the same optimizer, or start afresh from the saved model."
        )
    return saved
