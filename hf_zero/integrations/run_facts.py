"""Facts of a run, written into its checkpoints and read for its model card."""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..checkpoint.files import refuse_links, replace_file
from ..checkpoint.json_files import read_mapping
from ..checkpoint.manifest import Manifest
from ..checkpoint.origin import is_foreign
from ..checkpoint.rows import versions_of
from ..checkpoint.run_log import RUN_FIELDS, RUN_NAME, STATE_NAME, is_finite, is_step, read_history, read_run
from ..config.zero import changed
from ..hooks.weak import engine_attached_to
from ..integrations.saved_weights import is_checkpoint_of_ours, saved_tensors
from ..integrations.state_io import ZERO_FOLDER

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


# A fact missing in the files is also omitted from the card.

_ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "fp16",
    "activation_checkpointing",
    "seed",
)
_SPEED = {
    "train_runtime": "training, s",
    "train_samples_per_second": "samples a second",
    "train_steps_per_second": "steps a second",
}
_OF_THE_STATE = ("global_step", "log_history")
"""Fields of a Trainer's state used for the card."""

_PROGRESS = ("steps trained", "epochs trained")

_LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub")


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """A run's facts for a card. An empty mapping or None means unknown.

    Attributes:
        losses, eval_losses: (step, value) pairs in the order of logging; only finite values.
    """

    base_model: str | None
    model: dict[str, Any]
    data: dict[str, Any]
    metrics: dict[str, Any]
    hyperparameters: dict[str, Any]
    zero: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    measured: dict[str, Any]
    losses: tuple[tuple[int, float], ...]
    eval_losses: tuple[tuple[int, float], ...]


def card_facts(folder: Path, history: Sequence[Mapping[str, Any]] | None = None) -> CardFacts:
    """Reads the facts from the files of a checkpoint or model folder.

    Args:
        folder: the folder.
        history: a Trainer's `state.log_history`, if newer than the folder's; None reads the folder's.

    Raises:
        CheckpointError: an existing file cannot be read.
    """
    refuse_links(folder, [folder / name for name in (RUN_NAME, STATE_NAME, "config.json")])
    run, state = read_run(folder), _read(folder / STATE_NAME)
    if not state:
        # A folder made from a checkpoint contains the record copied by `carry_run`.
        state = {name: run[name] for name in _OF_THE_STATE if name in run}
    if history is None:
        history = read_history(folder)
    manifest = Manifest.read(folder / ZERO_FOLDER) if (folder / ZERO_FOLDER).is_dir() else None
    arguments, zero, data, hardware, versions = (dict(run.get(field, {})) for field in RUN_FIELDS)
    if manifest is not None:
        # The record takes precedence over the manifest, which contains only the stage and the ranks.
        zero = {"stage": manifest.stage, "ranks": manifest.world_size} | zero
        arguments = arguments or _of_optimizers(manifest)
    base_model = run.get("base_model")
    return CardFacts(
        base_model=base_model if _is_repo_id(base_model) else None,
        model=_model(folder),
        data=data,
        metrics=_metrics(history),
        hyperparameters=arguments | _progress(state, history),
        zero=zero,
        hardware=hardware,
        versions=versions or (manifest.versions if manifest is not None else {}),
        measured=_measured(history),
        losses=_series(history, "loss"),
        eval_losses=_series(history, "eval_loss"),
    )


def carry_run(checkpoint: Path, out: Path) -> None:
    """Copies the run's record to a model folder made from a checkpoint: settings, set-up and losses.

    Raises:
        CheckpointError: a file of the checkpoint cannot be read.
    """
    state = _read(checkpoint / STATE_NAME)
    facts = card_facts(checkpoint)
    run = {
        "base_model": facts.base_model,
        "arguments": {name: value for name, value in facts.hyperparameters.items() if name not in _PROGRESS},
        **{name: getattr(facts, name) for name in ("zero", "data", "hardware", "versions")},
        **{name: state[name] for name in _OF_THE_STATE if name in state},
    }
    if any(run.values()):
        replace_file(out / RUN_NAME, json.dumps(run, indent=2) + "\n")


def write_run(trainer: "Trainer", folder: Path) -> None:
    """Writes the run's record, from which a card can be made without the Trainer."""
    args = trainer.args
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    engine = engine_attached_to(model)
    base_model = getattr(getattr(model, "config", None), "name_or_path", None)
    with_adapters = ("peft",) if hasattr(model, "peft_config") else ()
    run = {
        "base_model": base_model if is_hub_name(base_model) else None,
        "arguments": {name: value for name in _ARGUMENTS if _was_said(value := _argument(args, name))},
        "zero": {} if engine is None else changed(engine.config) | {"ranks": args.world_size},
        "data": _data(trainer),
        "hardware": _hardware(args.world_size),
        "versions": {"python": platform.python_version(), **versions_of(*_LIBRARIES, *with_adapters)},
    }
    replace_file(folder / RUN_NAME, json.dumps(run, indent=2, default=str) + "\n")


def _argument(args: "TrainingArguments", name: str) -> object:
    """Returns an argument's value. Before transformers 5.23, activation checkpointing had a different name."""
    older = {"activation_checkpointing": "gradient_checkpointing"}
    return getattr(args, name, getattr(args, older.get(name, name), None))


def _was_said(value: object) -> bool:
    """Whether an argument has an effect: switched-off flags and `max_steps=-1` have none."""
    # `is`, because `0 == False` and a weight decay of 0 is meaningful.
    return value is not None and value is not False and value != -1


def _data(trainer: "Trainer") -> dict[str, Any]:
    data: dict[str, Any] = {}
    for what, dataset in (("training", trainer.train_dataset), ("evaluation", trainer.eval_dataset)):
        if hasattr(dataset, "__len__") and not isinstance(dataset, Mapping):
            data[f"{what} rows"] = len(dataset)
    builder = getattr(trainer.train_dataset, "builder_name", None)
    # A builder named after a file format does not identify the data.
    if builder and builder not in ("generator", "json", "csv", "text", "parquet", "arrow", "pandas"):
        data = {"dataset": getattr(trainer.train_dataset.info, "dataset_name", None) or builder, **data}
    return data


def _hardware(world_size: int) -> dict[str, Any]:
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "devices": f"{world_size} x {device.name}",
            "memory of a device, GiB": round(device.total_memory / 2**30, 1),
        }
    return {"devices": f"CPU ({platform.machine()}), {world_size} ranks", "cores of the machine": os.cpu_count()}


def _read(path: Path) -> dict[str, Any]:
    return read_mapping(path) if path.is_file() else {}


def is_hub_name(name: object) -> TypeGuard[str]:
    """Whether a model's name is a Hub name. A local folder may look like OWNER/NAME, the name of a different model."""
    return _is_repo_id(name) and not Path(name).exists()


def _is_repo_id(name: object) -> TypeGuard[str]:
    if not isinstance(name, str) or not name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _model(folder: Path) -> dict[str, Any]:
    config = _read(folder / "config.json")
    model: dict[str, Any] = {}
    if config.get("architectures"):
        named = config["architectures"]
        model["architecture"] = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
    # TRL's trainers write their card before each save, and the first time the folder contains no weights.
    has_weights = any(folder.glob("*.safetensors")) or is_checkpoint_of_ours(folder) or is_foreign(folder)
    if not has_weights or (folder / "adapter_config.json").is_file():
        return model
    tensors = saved_tensors(folder)
    model["parameters"] = sum(math.prod(tensor.shape) for tensor in tensors)
    model["saved as"] = ", ".join(sorted({tensor.dtype for tensor in tensors}))
    return model


def _of_optimizers(manifest: Manifest) -> dict[str, Any]:
    """Returns settings shared by all groups of a single optimizer, without the learning rate, which schedulers change."""
    if len(manifest.optimizers) != 1:
        return {}
    optimizer = manifest.optimizers[0]
    if not optimizer["groups"]:
        return {"optim": optimizer["class"]}
    first, *others = [group["settings"] for group in optimizer["groups"]]
    shared = {
        name: first[name]
        for name in ("betas", "eps", "momentum", "weight_decay")
        if name in first and all(other.get(name) == first[name] for other in others)
    }
    started = {"learning_rate": first["initial_lr"]} if "initial_lr" in first else {}
    return {"optim": optimizer["class"], **started, **shared}


def _progress(state: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last = history[-1] if history else {}
    reached = (last.get("step", state.get("global_step")), last.get("epoch"))
    return {name: value for name, value in zip(_PROGRESS, reached) if value is not None}


def _metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the last evaluation and the last training loss."""
    metrics: dict[str, Any] = {}
    for entry in reversed(history):
        if "loss" in entry:
            metrics = {"training loss, last logged": entry["loss"]}
            break
    for entry in reversed(history):
        evaluated = {name: value for name, value in entry.items() if name.startswith("eval_")}
        if evaluated:
            timing = ("_runtime", "_per_second", "_preparation_time")
            return metrics | {name: value for name, value in evaluated.items() if not name.endswith(timing)}
    return metrics


def _measured(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    peaks = [entry["zero/peak_mib"] for entry in history if "zero/peak_mib" in entry]
    if peaks:
        measured["peak memory of the first rank, MiB"] = max(peaks)
    for entry in history:
        measured |= {said: entry[name] for name, said in _SPEED.items() if name in entry}
    return measured


def _series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    found = [(entry.get("step"), entry[name]) for entry in history if name in entry]
    return tuple((step, float(value)) for step, value in found if is_step(step) and is_finite(value))
