"""Saves and loads engine state as checkpoints, in Trainer and accelerate."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..buckets.rows import KindsOf, Read
from ..checkpoint.commit import seal
from ..checkpoint.disks import Disk
from ..checkpoint.faults import CheckpointError
from ..checkpoint.live_pieces import Piece
from ..checkpoint.manifest import Manifest, SaveIdentity, new_save, refuse_other_save
from ..checkpoint.on_all_ranks import on_all_ranks
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.rows import Row, plan_rows, write_pieces
from ..checkpoint.verify import agreed, findings_in
from ..comm.all_or_none import Merge
from ..engine.engine import ZeroEngine
from ..engine.split_model import read_part
from ..engine.state import EngineState, SavedState
from ..layout.boxes import Box
from ..layout.intervals import Interval
from ..optimizer.row_state import SHARD_MARK
from ..optimizer.trial_step import state_names
from .group_settings import _plain, plain_settings, restore_settings, same_groups, tell_apart
from .progress_bars import progress_bar, progress_of
from .weight_rows import weight_rows

AFTER_A_FAILED_LOAD = "Nothing was trained; resume from another checkpoint."


# ---- Loads master weights and optimizer state into an engine, from a checkpoint of any format ----


@dataclass(frozen=True, kw_only=True)
class SavedOptimizers:
    """Master weights and optimizer state of an open checkpoint that fits the run.

    Attributes:
        settings: the groups of the run's optimizers, each with its saved settings.
        read: returns an interval of one kind of a parameter's state, as a 1-D host tensor with its own memory.
        read_part: the same for a part of the parameter; None to read the part interval by interval with `read`.
        kinds_of: returns the kinds of a parameter's state with one value per element.
        scalars_of: returns the state that belongs to a parameter as a whole (`step`).
        own_values: for each optimizer, the values its class adds to `state_dict()`.
        origin: the writer, in words; None for hf_zero.
        identity: identity of the save that wrote this rank's part; None for foreign checkpoints.
    """

    settings: list[tuple[dict[str, Any], dict[str, Any]]]
    read: Read
    kinds_of: KindsOf
    scalars_of: Callable[[str], dict[str, Any]]
    own_values: Sequence[tuple[torch.optim.Optimizer, dict[str, Any]]] = ()
    origin: str | None = None
    read_part: Callable[[str, str, Box, Interval], torch.Tensor] | None = None
    identity: SaveIdentity | None = None

    def part(self, kind: str, name: str, box: Box, interval: Interval) -> torch.Tensor:
        """Returns the elements `interval` of a part of one kind of a parameter's state."""
        if self.read_part is not None:
            return self.read_part(kind, name, box, interval)
        return read_part(box, interval, partial(self.read, kind, name))


def refuse_other_state(
    path: Path, optimizer: torch.optim.Optimizer, group: dict[str, Any], settings: dict[str, Any], found: Iterable[str]
) -> None:
    """Raises `CheckpointError` if a matrix's saved state is of a different optimizer. Some files do not name the class.

    Args:
        path: the file, for the error.
        optimizer: the run's optimizer.
        group, settings: a group of the optimizer, and the settings it gets from the file.
        found: names of the saved state; empty if saved before the first step.
    """
    there = set(found)
    missing = state_names(optimizer, group | settings) - there
    if there and missing:
        raise CheckpointError(
            f"hf_zero: {path} has {', '.join(sorted(there))} as state of a parameter, and {type(optimizer).__name__} needs "
            f"{min(missing)!r}. Resume with the optimizer that it was made with, or start afresh from the saved model."
        )


Opens = Callable[[Path, EngineState], AbstractContextManager[SavedOptimizers]]
"""Opens a checkpoint of one format for this rank. Raises `CheckpointError` if damaged or unfit for the run."""


def load_state(engine: ZeroEngine, path: Path, opens: Opens) -> str | None:
    """Replaces master weights, optimizer state and group settings by saved ones; returns their `origin`. Collective.

    Load the parameters beforehand. Every rank reads only the bytes of its own shards, regardless of the world size and stage
    of the save.

    Raises:
        CheckpointError: on every rank, if the checkpoint is incomplete, damaged, or of a different model or optimizer.
    """
    loaded = on_all_ranks(
        engine.world.exchange,
        lambda: _load_own(engine, path, opens),
        doing=f"read {path}",
        then=AFTER_A_FAILED_LOAD,
    )
    refuse_mixed_parts(path, [identity for _, identity in loaded])
    # Only after all ranks agree: a rank with a damaged file would leave the others waiting in a gather.
    engine.state.share_outside()
    return loaded[0][0]


def refuse_mixed_parts(path: Path, identities: Sequence[SaveIdentity | None]) -> None:
    """Raises `CheckpointError` if ranks, each reading its own host's disk, have read parts of different saves.

    Args:
        path: the folder read.
        identities: identities of the ranks' parts, in rank order.
    """
    first = identities[0]
    for rank, identity in enumerate(identities):
        if first is not None and identity is not None:
            refuse_other_save(f"{path} on rank 0", first, f"on rank {rank}", identity)


def _load_own(engine: ZeroEngine, path: Path, opens: Opens) -> tuple[str | None, SaveIdentity | None]:
    with opens(path, engine.state) as saved:
        for group, settings in saved.settings:
            restore_settings(group, settings)
        with progress_bar("reading optimizer state", is_main=engine.world_groups.rank == 0) as show:
            boxes, dtypes = engine.state.boxes(), engine.state.master_dtypes()

            def read(kind: str, name: str, interval: Interval) -> torch.Tensor:
                box = boxes.get(name)
                values = saved.read(kind, name, interval) if box is None else saved.part(kind, name, box, interval)
                show(values.nbytes)
                # Like torch's `load_state_dict`: cast the state to the dtype of the stepped tensor.
                is_alike = saved.origin is None or not values.is_floating_point()
                return values if is_alike else values.to(dtypes[name])

            engine.state.fill(read, saved.kinds_of, saved.scalars_of)
        for optimizer, own in saved.own_values:
            _restore_own_values(optimizer, own)
        return saved.origin, saved.identity


# ---- Saves an engine's state to a checkpoint folder and loads it ----

ZERO_FOLDER = "zero"


def write_state(engine: ZeroEngine, folder: str | Path, save: str | None = None) -> Manifest:
    """Writes master weights and optimizer state to `folder`, every rank its own shards; returns the manifest to seal. Collective.

    For a model split over ranks, also writes the weights.

    Args:
        engine: the engine.
        folder: the folder to write to.
        save: ID of the save, equal on every rank; None for a new one.
    """
    if engine.state.is_split:
        model = weight_rows(engine)
        manifest, pieces = plan_state(engine, folder, save=save, weights=model.rows)
        manifest = replace(manifest, weights=dict(model.weights))
    else:
        manifest, pieces = plan_state(engine, folder, save=save)
    nbytes = sum(piece.nbytes for piece in pieces)
    with progress_bar("writing optimizer state", nbytes, is_main=engine.world_groups.rank == 0) as show:
        return write_pieces(pieces, Path(folder), engine.world.merge, engine.world_groups.rank, manifest, show)


def plan_state(
    engine: ZeroEngine,
    folder: str | Path,
    *,
    save: str | None = None,
    with_state: bool = True,
    weights: Sequence[Row] = (),
) -> tuple[Manifest, list[Piece]]:
    """Creates the files of master weights and optimizer state. Returns the manifest to seal and this rank's part. Collective.

    Args:
        engine: the engine.
        folder: the folder to write to.
        save: ID of the save, equal on every rank; None for a new one.
        with_state: False writes no optimizer state, for a checkpoint of the model only.
        weights: this rank's shards of the model itself.
    """
    groups = engine.world_groups
    saved = engine.state.to_save() if with_state else SavedState()
    shapes, boxes = engine.state.shapes(), engine.state.boxes()
    own_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    rows: list[Row] = []
    for row in saved.rows:
        shape, interval = row.own_shape, row.interval
        if row.of_each is not None:
            index, count = row.of_each
            whole = shapes[row.name]
            shape = (count, *whole)
            interval = interval.shift(index * boxes.get(row.name, Box.whole(whole)).numel)
        if shape is not None:
            own_shapes.setdefault(row.name, {})[row.kind] = shape
        rows.append((row.kind, row.name, interval, row.tensor))
    return plan_rows(
        Path(folder),
        rank=groups.rank,
        world_size=groups.world_size,
        stage=engine.config.stage,
        save=engine.world.exchange(new_save() if groups.rank == 0 else "")[0] if save is None else save,
        rows=[*weights, *rows],
        shapes=shapes,
        scalars=saved.scalars,
        # Called inside the collective work, so an optimizer that cannot be saved fails on all ranks.
        optimizers=lambda: [_described(optimizer, group_names) for optimizer, group_names in saved.groups],
        merge=engine.world.merge,
        own_shapes=own_shapes,
        boxes=boxes,
    )


def _described(optimizer: torch.optim.Optimizer, group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns an optimizer's class and groups as JSON values.

    Raises:
        CheckpointError: the settings, or state not belonging to a parameter, cannot be saved.
    """
    name, loose = type(optimizer).__name__, [key for key in optimizer.state if not torch.is_tensor(key)]
    if loose:
        raise CheckpointError(
            f"hf_zero: {name} keeps state under {loose[0]!r}, which is not a parameter, and only the state of parameters is "
            "saved. Keep it in `param_groups`, which are also saved, or train without checkpoints."
        )
    described: dict[str, Any] = {
        "class": name,
        "groups": [
            {"settings": plain_settings(group), "parameters": list(names)}
            for group, names in zip(optimizer.param_groups, group_names)
        ],
    }
    own = _own_values(optimizer)
    return described | {"own": own} if own else described


def _own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the values that the optimizer's class adds to `state_dict()`, as JSON values.

    Raises:
        CheckpointError: a value is not a JSON value.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    stock = {"state", "param_groups", SHARD_MARK}
    return {key: _plain(value, key) for key, value in optimizer.state_dict().items() if key not in stock}


def _restore_own_values(optimizer: torch.optim.Optimizer, own: dict[str, Any]) -> None:
    """Passes saved values of the optimizer's class to its `load_state_dict`, without changing the parameters' state."""
    if own:
        state = optimizer.state
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {}, "param_groups": groups, **own})
        optimizer.state = state


def seal_state(
    engine: ZeroEngine,
    root: Path,
    manifest: Manifest,
    *,
    folder: str = ZERO_FOLDER,
    within: str = "",
    disk: Disk | None = None,
    merge: Merge | None = None,
) -> None:
    """Writes the manifest, which makes `root` a complete checkpoint. Collective, through `merge` or the engine's own.

    Args:
        engine: the engine.
        root: the checkpoint's folder.
        manifest: the manifest to write.
        folder: the engine's folder inside `root`.
        within: prefix of the manifest's file names.
        disk: the disk of `root`; by default one shared by all ranks.
        merge: replaces the engine's own merge, for an asynchronous save.
    """
    groups = engine.world_groups
    disk = disk or Disk.shared(groups.rank, groups.world_size)
    seal(root, manifest, folder=folder, within=within, disk=disk, merge=merge or engine.world.merge)


def state_bytes(engine: ZeroEngine, disk: Disk) -> int:
    """Estimates the disk space of this engine's checkpoint: whole weights, and this disk's ranks' state. Collective."""
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    states = engine.world.exchange(sum(row.tensor.nbytes for row in engine.state.rows_to_save()))
    return weights + sum(states[rank] for rank in disk.ranks)


def refuse_faults(engine: ZeroEngine, root: Path, folder: str) -> None:
    """Raises `CheckpointError` on every rank unless the checkpoint is complete and unchanged. Collective."""
    groups = engine.world_groups
    with progress_of(f"checking {root.name}", is_main=groups.rank == 0) as show:
        mine = findings_in(root, folder, rank=groups.rank, world_size=groups.world_size, on_progress=show)
    # Each rank has checked its share of the files, and all raise the same error.
    found = agreed(engine.world.exchange, mine)
    if found.faults:
        raise CheckpointError(
            f"hf_zero: {root} cannot be resumed from: {'; '.join(found.faults[:5])}. {AFTER_A_FAILED_LOAD}"
        )
    if found.edits and groups.rank == 0:
        warnings.warn(found.warning(root), stacklevel=2)


def load_engine(engine: ZeroEngine, folder: str | Path) -> None:
    """Replaces master weights and optimizer state by those of one of our checkpoints; see `load_state`. Collective."""
    load_state(engine, Path(folder), open_own)


@contextmanager
def open_own(folder: Path, state: EngineState) -> Iterator[SavedOptimizers]:
    """Opens the `zero/` folder of one of our checkpoints, for `load_state`."""
    with CheckpointReader(folder) as reader:
        # Before reading any state, because a different model's checkpoint would fail halfway.
        reader.check_names(state.shapes())
        settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        own_values: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
        for (optimizer, names), saved in zip(state.groups(), _saved_optimizers(state, reader, folder)):
            # State is found by name and settings by group: with different groups, weight decay would apply to different
            # parameters.
            if not same_groups(saved["groups"], names):
                raise CheckpointError(
                    f"hf_zero: {folder}: the parameter groups of {saved['class']} hold different parameters than the "
                    "optimizer's groups now. Resume with the weight-decay and group settings that the checkpoint was made with."
                )
            for group, its in zip(optimizer.param_groups, saved["groups"]):
                _refuse_namesake(saved["class"], its["settings"], group, folder)
            settings.extend(zip(optimizer.param_groups, (group["settings"] for group in saved["groups"])))
            own_values.append((optimizer, saved.get("own", {})))
        yield SavedOptimizers(
            settings=settings,
            own_values=own_values,
            read=reader.read,
            kinds_of=reader.kinds_of,
            scalars_of=reader.scalars_of,
            identity=reader.manifest.identity,
        )


def _refuse_namesake(name: str, saved: dict[str, Any], group: dict[str, Any], folder: Path) -> None:
    """Raises `CheckpointError` for different optimizers with the same class name, such as transformers' and torch's Adafactor."""
    differing = tell_apart(saved, group)
    if differing is not None:
        there, here = differing
        raise CheckpointError(
            f"hf_zero: {folder} was made with a different optimizer also called {name}: it has the setting {there!r}, "
            f"and this run's has {here!r}. Resume with the same package's optimizer, or start afresh from the saved "
            "model."
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


def steps_of(folder: Path) -> int:
    """Returns the optimizer steps before a saved state: the manifest's number, or else the optimizer's own count."""
    manifest = Manifest.read(folder / ZERO_FOLDER)
    # The optimizer's own count is a guess: Adam counts the steps of each parameter, and some optimizers count none.
    if manifest.step is not None:
        return manifest.step
    counts = [scalars["step"] for scalars in manifest.scalars.values() if "step" in scalars]
    return int(max((count["value"] if isinstance(count, dict) else count for count in counts), default=0))
