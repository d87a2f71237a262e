"""Loads checkpoints of DeepSpeed ZeRO and FSDP into an engine, or converts them to checkpoints of hf_zero."""

import inspect
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.commit import abandon, begin, commit, seal
from ..checkpoint.disks import Disk
from ..checkpoint.faults import CheckpointError
from ..checkpoint.files import no_folder, refuse_links
from ..checkpoint.hashes import Progress, untold
from ..checkpoint.manifest import new_save
from ..checkpoint.origin import METADATA_NAME, MODEL_FOLDER, OPTIMIZER_FOLDER, is_dcp
from ..checkpoint.rows import plan_rows, write_pieces
from ..comm.all_or_none import Merged
from ..engine.state import EngineState
from ..integrations.config_model import CONFIG_NAME, expected_tensors, meta_model
from ..integrations.group_settings import plain_settings
from ..integrations.state_io import ZERO_FOLDER, SavedOptimizers, refuse_other_state
from ..layout.intervals import Interval
from .dcp import DcpCheckpoint
from .deepspeed import DeepSpeedCheckpoint, step_folder_of
from .states import MASTER, ForeignCheckpoint


def open_foreign(folder: Path) -> ForeignCheckpoint:
    """Opens a checkpoint of DeepSpeed ZeRO or FSDP. Reads only headers and metadata, and follows no link out of the folder.

    Args:
        folder: a folder of Trainer or accelerate (`checkpoint-N`), or DeepSpeed's own, with a file `latest` or of one step.

    Raises:
        CheckpointError: the folder is of neither engine, incomplete, or of a variant that is not supported.
    """
    refuse_links(folder, sorted(path for path in folder.rglob("*") if path.is_symlink()))
    try:
        return _open(folder)
    except (CheckpointError, OSError, MemoryError, ImportError):
        raise
    except Exception as error:
        # The formats are pickles, so fields may have any value.
        raise CheckpointError(
            f"hf_zero: {folder} is damaged, or is a variant that is not supported ({type(error).__name__}: "
            f"{str(error)[:200]}). Resume from another checkpoint."
        ) from error


def _open(folder: Path) -> ForeignCheckpoint:
    if not folder.is_dir():
        raise CheckpointError(f"hf_zero: {no_folder(folder)}.")
    if (folder / "pytorch_model_fsdp.bin").is_file():
        raise CheckpointError(
            f"hf_zero: {folder} is from an FSDP run with state_dict_type FULL_STATE_DICT, which is not supported. Save it with "
            "FSDP and SHARDED_STATE_DICT."
        )
    if is_dcp(folder):
        return DcpCheckpoint(folder)
    step_folder = step_folder_of(folder)
    if step_folder is None:
        found = sorted(path.name for path in folder.iterdir())[:8]
        raise CheckpointError(
            f"hf_zero: {folder} is not a checkpoint of DeepSpeed ZeRO (`latest` and `global_step…/`) or of FSDP "
            f"({MODEL_FOLDER}/ and {OPTIMIZER_FOLDER}/, {METADATA_NAME} of torch.distributed.checkpoint, or shard-…safetensors "
            f"of transformers); found: {found}."
        )
    return DeepSpeedCheckpoint(folder, step_folder)


_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Settings that change how a step is computed but not its result. The resuming run keeps its own."""
_NOT_COPIED = (".safetensors", ".bin", ".index.json", ".distcp")
_OF_THE_ENGINE = ("latest", "zero_to_fp32.py", "zero_to_torch.py", ".metadata")


@contextmanager
def open_saved_by_others(folder: Path, state: EngineState) -> Iterator[SavedOptimizers]:
    """Yields the masters and optimizer state of a DeepSpeed or FSDP checkpoint, for `load_state`.

    Parameters that are trained in fp32 are loaded before, by `load_foreign_weights`.

    Raises:
        CheckpointError: the checkpoint is damaged, not supported, or of a model with other parameters or groups.
    """
    foreign = open_foreign(folder)
    foreign.check_names(state.shapes())
    optimizers = state.groups()
    if len(optimizers) != 1:
        raise CheckpointError(
            f"hf_zero: {folder} is from a run with one optimizer, but this run has {len(optimizers)}. Resume with one "
            "optimizer."
        )
    [(optimizer, group_names)] = optimizers
    here = [(group, set(names)) for group, names in zip(optimizer.param_groups, group_names) if names]
    if [names for _, names in here] != [set(group.names) for group in foreign.groups]:
        raise CheckpointError(
            f"hf_zero: {folder} ({foreign.origin}) has groups of {[len(group.names) for group in foreign.groups]} parameters, "
            f"but {type(optimizer).__name__} has groups of {[len(names) for _, names in here]}, or with different parameters. "
            "Resume with the weight-decay and group settings that the checkpoint was made with."
        )
    settings = []
    for (group, _), saved in zip(here, foreign.groups):
        _refuse_other_optimizer(type(optimizer).__name__, group, saved.settings, folder)
        taken = {k: v for k, v in saved.settings.items() if k in group and k not in _OF_THE_MACHINE}
        for name in [name for name in saved.names if len(foreign.shapes[name]) == 2][:1]:
            found = {*foreign.kinds_of(name), *foreign.scalars_of(name)} - {MASTER}
            refuse_other_state(folder, optimizer, group, taken, found)
        settings.append((group, taken))
    yield SavedOptimizers(
        settings=settings,
        read=foreign.read,
        read_part=foreign.read_part,
        kinds_of=foreign.kinds_of,
        scalars_of=foreign.scalars_of,
        origin=foreign.origin,
    )


def _refuse_other_optimizer(kind: str, group: dict[str, Any], saved: dict[str, Any], folder: Path) -> None:
    """Raises if the settings show a different optimizer. Neither format records its class; Adam has betas, SGD has momentum."""
    for key in ("betas", "momentum"):
        if key in saved and key not in group:
            raise CheckpointError(
                f"hf_zero: {folder} was made with an optimizer that has {key}, but {kind} has none. Resume with the same "
                "optimizer."
            )


def load_foreign_weights(model: nn.Module, folder: Path) -> Any:
    """Loads all weights of a DeepSpeed or FSDP checkpoint into a model; returns the result of `load_state_dict`.

    Trained weights are the optimizer's values, in fp32 after mixed precision, so no precision is lost. The whole model is in host
    memory during the call.

    Raises:
        CheckpointError: the checkpoint is damaged, not supported, or of another model.
    """
    foreign = open_foreign(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, shape in foreign.shapes.items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"hf_zero: {folder} ({foreign.origin}) is from a different model: {name!r} has shape {shape} in the "
                f"checkpoint, but the model has {shapes.get(name, 'no such parameter')}. Resume with the model that the "
                "checkpoint was made with."
            )
    return model.load_state_dict(dict(foreign.weights()), strict=False)


def convert(
    source: Path, out: Path, *, config_folder: Path | None, optimizer: str, on_progress: Progress = untold
) -> str:
    """Converts a DeepSpeed or FSDP checkpoint into an hf_zero checkpoint folder; returns a description of the source.

    The folder contains the weights in the format of `from_pretrained`, with the precision of the masters; masters and optimizer
    state in `zero/`; and the other files of the source (scheduler, random states, trainer state, tokenizer). All of this is in
    host memory during the call: three times the weights in fp32.

    Args:
        out: a new or empty folder, which appears when it is complete.
        config_folder: a folder with the model's config.json; None uses the source.
        optimizer: class name of the optimizer, which neither format records.
        on_progress: called with the bytes of state read and written so far, and the total.

    Raises:
        CheckpointError: the checkpoint is damaged, not supported, or not of the config's model.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"hf_zero: {out} is not an empty folder; pass a new or empty one.")
    foreign = open_foreign(source)
    model = _with_weights(foreign, config_folder or source)
    moved = _Moved(foreign, on_progress)
    rows = []
    for kind, name, interval in moved.rows:
        values = foreign.read(kind, name, interval)
        # Parameters of 16 bits are stepped in fp32 masters here, so their state is fp32 as well.
        rows.append((kind, name, interval, values if kind == MASTER or values.itemsize != 2 else values.float()))
        moved.by(rows[-1][-1].nbytes)
    needed_bytes = sum(tensor.nbytes for *_, tensor in rows) * 2
    disk = Disk.shared()
    temporary = begin(out, needed_bytes=needed_bytes, disk=disk, merge=_alone)
    try:
        model.save_pretrained(temporary)
        _copy_other_files(source, temporary)
        manifest, pieces = plan_rows(
            temporary / ZERO_FOLDER,
            rank=0,
            world_size=1,
            stage=0,
            save=new_save(),
            rows=rows,
            shapes=foreign.shapes,
            scalars={name: foreign.scalars_of(name) for name in foreign.shapes},
            optimizers=lambda: [{"class": optimizer, "groups": _groups_of(foreign, optimizer)}],
            merge=_alone,
        )
        manifest = write_pieces(pieces, temporary / ZERO_FOLDER, _alone, 0, manifest, moved.by)
        seal(temporary, manifest, folder=ZERO_FOLDER, within="", disk=disk, merge=_alone)
        commit(temporary, out, disk=disk, merge=_alone)
    except BaseException:
        abandon(temporary, disk=disk)
        raise
    return foreign.origin


class _Moved:
    """Reports progress of the optimizer state: each row is read and written, in fp32."""

    def __init__(self, foreign: ForeignCheckpoint, on_progress: Progress):
        self.rows = [
            (kind, name, Interval(0, torch.Size(shape).numel()))
            for name, shape in foreign.shapes.items()
            for kind in foreign.kinds_of(name)
        ]
        self._total = 2 * sum(4 * interval.numel for *_, interval in self.rows)
        self._done = 0
        self._on_progress = on_progress

    def by(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        self._on_progress(self._done, self._total)


def _alone(value: Merged) -> Merged:
    return value


def _groups_of(foreign: ForeignCheckpoint, optimizer: str) -> list[dict[str, Any]]:
    """Returns the groups with the settings of torch's optimizer of this name only; DeepSpeed's fused optimizers have more."""
    kind = getattr(torch.optim, optimizer, None)
    known = {"initial_lr", *inspect.signature(kind).parameters} if isinstance(kind, type) else None
    return [
        {
            "settings": {
                name: value
                for name, value in plain_settings(group.settings).items()
                if name not in _OF_THE_MACHINE and (known is None or name in known)
            },
            "parameters": list(group.names),
        }
        for group in foreign.groups
    ]


def _with_weights(foreign: ForeignCheckpoint, config_folder: Path) -> PreTrainedModel:
    """Makes the config's model with the checkpoint's weights."""
    if not (config_folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"hf_zero: {config_folder} has no {CONFIG_NAME}; pass the model's folder with --config.")
    weights = dict(foreign.weights())
    # Try the config in a separate process first, because building its model may take forever.
    expected_tensors(config_folder, len(weights))
    model = meta_model(config_folder, len(weights))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, value in weights.items():
        if shapes.get(name) != tuple(value.shape):
            raise CheckpointError(
                f"hf_zero: {foreign.folder} ({foreign.origin}): {name!r} has shape {tuple(value.shape)}, but the config's "
                f"model has {shapes.get(name, 'no such tensor')}. Either a file of the checkpoint is missing, or this is not "
                "the model's own config: pass its folder with --config."
            )
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, value in model.state_dict().items() if value.is_meta]
    if missing:
        raise CheckpointError(
            f"hf_zero: {foreign.folder} ({foreign.origin}) has no {missing[0]!r}, which the config's model has ({len(missing)} "
            "such tensors): frozen parameters were not saved, or it is a different model."
        )
    return model


def _copy_other_files(source: Path, out: Path) -> None:
    paths = sorted(source.iterdir())
    refuse_links(source, paths)
    for path in paths:
        of_weights = path.name.endswith(_NOT_COPIED) and path.name not in ("training_args.bin", "scheduler.bin")
        if path.is_file() and not of_weights and path.name not in _OF_THE_ENGINE and not (out / path.name).exists():
            shutil.copy2(path, out / path.name)
