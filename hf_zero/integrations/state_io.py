"""Saves and loads engine state as checkpoints, in Trainer and accelerate."""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..buckets.rows import KindsOf, Read
from ..checkpoint.commit import Disk, on_all_ranks, seal
from ..checkpoint.files import CheckpointError, shown
from ..checkpoint.manifest import WEIGHTS, Manifest, SavedWeight, SaveIdentity, new_save, refuse_other_save
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.structure import STATE_NAME, agreed, findings_in
from ..checkpoint.writer import Piece, Row, dtype_name, plan_rows, write_pieces
from ..comm.all_or_none import Exchange
from ..engine.engine import ZeroEngine
from ..engine.split_model import read_part
from ..engine.state import EngineState, SavedState
from ..layout.boxes import Box
from ..layout.intervals import Interval
from ..optimizer.bucket_state import state_names
from ..step.sharded_optimizer import SHARD_MARK

AFTER_A_FAILED_LOAD = "Nothing was trained; resume from another checkpoint."

# ---- Progress bars for slow work: on the main rank, on a terminal, and unless progress bars are disabled ----

_PATIENCE_S = 1.0
"""Shorter work shows no bar."""
_EVERY_S = 0.1
"""Time between two updates of a bar."""


@contextmanager
def progress_bar(
    what: str, nbytes: int | None = None, *, is_main: bool, done_bytes: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes of each finished part. The bar disappears when the work ends.

    Args:
        what: the work, in words.
        nbytes: total bytes; None if unknown.
        is_main: whether this rank shows the bar.
        done_bytes: bytes finished before.
    """
    with _bar(what, nbytes, is_main=is_main, done_bytes=done_bytes) as bar:
        yield bar.update


@contextmanager
def progress_of(what: str, *, is_main: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with finished and total bytes. The bar starts again if the finished bytes decrease."""
    with ExitStack() as stack:
        bar: Any = None

        def show(done_bytes: int, total_bytes: int) -> None:
            nonlocal bar
            if bar is None or done_bytes < bar.n:
                stack.close()
                bar = stack.enter_context(_bar(what, total_bytes, is_main=is_main))
            bar.update(done_bytes - bar.n)

        yield show


def _bar(what: str, nbytes: int | None, *, is_main: bool, done_bytes: int = 0) -> Any:
    # Imported here because the Hub's client is slow to import.
    from huggingface_hub.utils import tqdm

    return tqdm(
        desc=f"hf_zero: {shown(what)}",
        total=nbytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        leave=False,
        delay=_PATIENCE_S,
        mininterval=_EVERY_S,
        # None shows the bar only on a terminal.
        disable=None if is_main and _are_wanted() else True,
    )


def _are_wanted() -> bool:
    """Whether transformers' progress bars are enabled. The Hub's tqdm follows its own switch."""
    logging = sys.modules.get("transformers.utils.logging")
    return logging is None or logging.is_progress_bar_enabled()


# ---- A model's tensors under their names in a checkpoint ----


def saved_tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the entries of `state_dict` by name, tied weights under each name, without gathering a sharded model."""
    found: dict[str, torch.Tensor] = {}
    # Include duplicates, because `state_dict` contains a module used twice, and a tied parameter, under each name.
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in [*module._parameters.items(), *kept.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def tensors_by_saved_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's tensors by their names in a checkpoint; only the adapters for a model with adapters."""
    tensors = saved_tensors_of(model)
    # Imported here because transformers is slow to import.
    from transformers.utils import is_peft_available

    if not is_peft_available():
        return tensors
    from peft import PeftModel, get_peft_model_state_dict

    return get_peft_model_state_dict(model, tensors) if isinstance(model, PeftModel) else tensors


# ---- The weights of a split model as shards in a checkpoint: each rank writes its part, without a gather ----


@dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    """A rank's part of the model to write: pieces of laid-out files, or shards for its own file in `zero/`.

    Attributes:
        weights: the tensors composed of all ranks' shards, by `save_pretrained`'s names; {} without shards.
    """

    pieces: Sequence[Piece] = ()
    rows: Sequence[Row] = ()
    weights: Mapping[str, SavedWeight] = field(default_factory=dict)


def weight_rows(engine: ZeroEngine) -> WeightsPlan:
    """Returns this rank's shards of the model under the model's own names, tied weights once. Collective."""
    with engine.sharded.gathered.lend_names():
        # Inside, parameters have the dtype of the saved values, which may differ from the dtype of forward and backward.
        tensors = saved_tensors_of(engine.model)
        weights = {
            name: SavedWeight(dtype=dtype_name(name, tensor.dtype), shape=engine.state.box_of(tensor).shape)
            for name, tensor in _each_once(tensors).items()
        }
    name_of = {id(tensor): name for name, tensor in _each_once(tensors).items()}
    bucketed = {id(parameter) for parameter in engine.state.bucketed_parameters()}
    rows: list[Row] = [
        (WEIGHTS, name_of[id(own.parameter)], own.interval, own.values)
        for own in engine.state.own_weights()
        if id(own.parameter) in name_of
    ]
    for name, tensor in _each_once(tensors).items():
        # Buffers are equal on all ranks, so rank 0 writes them.
        writes = (
            engine.state.writes(name, tensor)
            if isinstance(tensor, torch.nn.Parameter)
            else engine.world_groups.rank == 0
        )
        if id(tensor) not in bucketed and writes:
            rows.append((WEIGHTS, name, Interval(0, tensor.numel()), values_to_save(tensor)))
    return WeightsPlan(rows=rows, weights=weights)


def values_to_save(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor outside of all buckets, flat: a parameter's own values, or a copy of a buffer's values."""
    flat = tensor.detach().reshape(-1)
    # The forward of the next micro-batch may change a buffer, before the save copies values at the optimizer's step.
    return flat if isinstance(tensor, nn.Parameter) else flat.clone()


def _each_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Reversed, so the first of several names is assigned last and stays.
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


# ---- An optimizer group's settings to JSON values and back ----

_OF_A_RUN = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "step"}
"""Settings added to the groups of any optimizer by schedulers and steps."""


def tell_apart(saved: Iterable[str], group: Iterable[str]) -> tuple[str, str] | None:
    """Returns a setting only the saved optimizer has and one only this run's has; None if both may be the same optimizer.

    Additional settings on one side only are accepted, because releases add settings and scripts store their own in groups.
    """
    there, here = set(saved) - _OF_A_RUN, set(group) - _OF_A_RUN - {"params", "param_names"}
    return (min(there - here), min(here - there)) if there - here and here - there else None


def restore_settings(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restores saved group settings (learning rate, betas, …). Lists become tuples if the group has tuples.

    Raises:
        CheckpointError: a setting's type does not fit the group's, for example a string instead of a number.
    """
    for key, value in saved.items():
        current = group.get(key)
        if not _is_alike(value, current):
            raise CheckpointError(
                f"hf_zero: the checkpoint has {shown(repr(value), 80)} for the setting {shown(key, 80)!r}, which is {current!r} "
                "here. It is damaged or of another optimizer; resume from another checkpoint."
            )
        group[key] = _restored(value, current)


def _restored(value: Any, current: Any) -> Any:
    """Converts a saved setting to the form of the group's current value: tensor, number type, tuple or list."""
    if isinstance(current, torch.Tensor) and value is not None:
        # Fill the existing tensor, because a captured or compiled step refers to this object.
        return current.fill_(value)
    if isinstance(current, np.generic) and value is not None:
        return type(current)(value)
    if isinstance(current, tuple) and value is not None:
        return tuple(map(_restored, value, current))
    if isinstance(current, list) and value is not None:
        return list(map(_restored, value, current))
    return value


def _is_alike(value: Any, current: Any) -> bool:
    """Whether a saved setting can replace the group's. None on either side fits anything."""
    if value is None or current is None:
        return True
    if isinstance(current, np.generic):
        current = current.item()
    # Check bool before numbers, because a bool is an int, and a saved 0.9 would be accepted for a switch.
    if isinstance(current, bool | str) or torch.is_tensor(current):
        kind: Any = (bool, int, float) if torch.is_tensor(current) else type(current)
        return isinstance(value, kind) or torch.is_tensor(value)
    # A float may have become an int and vice versa. JSON integers have any size, but optimizers count in 64 bits.
    if isinstance(current, int | float):
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) or torch.is_tensor(value)
    if isinstance(current, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(current) and all(map(_is_alike, value, current))
    return True


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's settings, except its parameters, as JSON values.

    Raises:
        CheckpointError: a setting is not a JSON value, for example a function or a tensor of several numbers.
    """
    return {key: _plain(value, key) for key, value in group.items() if key not in ("params", "param_names")}


def _plain(value: Any, key: str) -> Any:
    # A learning rate may be a one-element tensor or a numpy number, which JSON does not support.
    if isinstance(value, np.generic) or (torch.is_tensor(value) and value.numel() == 1):
        value = value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return [_plain(each, key) for each in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(each, key) for name, each in value.items()}
    what = f"tensor of {value.numel()} numbers" if torch.is_tensor(value) else type(value).__name__
    raise CheckpointError(
        f"hf_zero: the optimizer's setting {key!r} is a {what}, which cannot be saved; allowed: numbers, strings, booleans, "
        "None, and lists and dicts of these. Keep it outside of `param_groups` and `state_dict()`, or train without checkpoints."
    )


def same_groups(saved: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]) -> bool:
    """Whether the saved groups contain the same parameters as `names`."""
    return [set(group["parameters"]) for group in saved] == [set(group) for group in names]


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
        return write_pieces(pieces, Path(folder), engine.world.exchange, manifest, show)


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
    own_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for row in saved.rows:
        if row.own_shape is not None:
            own_shapes.setdefault(row.name, {})[row.kind] = row.own_shape
    return plan_rows(
        Path(folder),
        rank=groups.rank,
        world_size=groups.world_size,
        stage=engine.config.stage,
        save=engine.world.exchange(new_save())[0] if save is None else save,
        rows=[*weights, *((row.kind, row.name, row.interval, row.tensor) for row in saved.rows)],
        shapes=engine.state.shapes(),
        scalars=saved.scalars,
        # Called inside the collective work, so an optimizer that cannot be saved fails on all ranks.
        optimizers=lambda: [_described(optimizer, group_names) for optimizer, group_names in saved.groups],
        merge=engine.world.merge,
        own_shapes=own_shapes,
        boxes=engine.state.boxes(),
    )


def _described(optimizer: torch.optim.Optimizer, group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns an optimizer's class and groups as JSON values.

    Raises:
        CheckpointError: the settings, or state not belonging to a parameter, cannot be saved.
    """
    name, loose = type(optimizer).__name__, [key for key in optimizer.state if not torch.is_tensor(key)]
    if loose:
        raise CheckpointError(
            f"hf_zero: {name} keeps state of no parameter, under {loose[0]!r}, and only that of parameters is saved. Keep it in "
            "`param_groups`, whose settings are saved too, or train without checkpoints."
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
    exchange: Exchange | None = None,
) -> None:
    """Writes the manifest, which makes `root` a complete checkpoint. Collective, through `exchange` or the engine's own.

    Args:
        engine: the engine.
        root: the checkpoint's folder.
        manifest: the manifest to write.
        folder: the engine's folder inside `root`.
        within: prefix of the manifest's file names.
        disk: the disk of `root`; by default one shared by all ranks.
        exchange: replaces the engine's own exchange, for an asynchronous save.
    """
    groups = engine.world_groups
    disk = disk or Disk.shared(groups.rank, groups.world_size)
    seal(root, manifest, folder=folder, within=within, disk=disk, exchange=exchange or engine.world.exchange)


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
                    f"hf_zero: {folder}: the parameter groups of {saved['class']} hold other parameters than the "
                    "optimizer's now. Resume with the weight-decay and group settings that the checkpoint was made with."
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
            f"hf_zero: {folder} was made with another optimizer that is called {name}: it has the setting {there!r}, "
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


# ---- The message of a resumed run: folder, step and origin ----


def say_resumed(engine: ZeroEngine, folder: str | Path, origin: str | None = None) -> None:
    """Prints the message to stderr, on rank 0 only.

    Args:
        engine: the engine.
        folder: the checkpoint's folder.
        origin: the checkpoint's writer, such as "plain Trainer"; None for hf_zero.
    """
    if engine.world_groups.rank != 0:
        return
    manifest = Manifest.read(Path(folder) / ZERO_FOLDER) if origin is None else None
    if manifest is not None:
        origin = _by(manifest.world_size, manifest.stage)
    here = _by(engine.world_groups.world_size, engine.config.stage)
    at = _progress(Path(folder), manifest)
    print(f"hf_zero: resumed from {folder}{at}, saved by {origin}; going on with {here}.", file=sys.stderr, flush=True)


def _by(ranks: int, stage: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''} at stage {stage}"


def _progress(folder: Path, manifest: Manifest | None) -> str:
    """Returns Trainer's step, or the optimizer's step count, if there is one."""
    if (folder / STATE_NAME).is_file():
        return f" at step {shown(json.loads((folder / STATE_NAME).read_text(encoding='utf-8'))['global_step'])}"
    steps = 0 if manifest is None else steps_of(folder)
    return f" after {steps} optimizer steps" if steps else ""


def steps_of(folder: Path) -> int:
    """Returns the optimizer steps before a saved state: the manifest's number, or else the optimizer's own count."""
    manifest = Manifest.read(folder / ZERO_FOLDER)
    # The optimizer's own count is a guess: Adam counts the steps of each parameter, and some optimizers count none.
    if manifest.step is not None:
        return manifest.step
    counts = [scalars["step"] for scalars in manifest.scalars.values() if "step" in scalars]
    return int(max((count["value"] if isinstance(count, dict) else count for count in counts), default=0))
