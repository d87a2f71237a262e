"""The weights of a Hugging Face folder: which tensor lies in which file, what is wrong with them, and writing them anew."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoint.manifest import CheckpointError
from .checkpointing import ZERO_FOLDER

RUN_NAME = "training_run.json"
"""Settings, set-up and hardware of the run that trained the model, for its card; without paths and secrets."""

_OF_THE_RUN = (
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "trainer_state.json",
    "training_args.bin",
    RUN_NAME,
)
"""Files that continue or describe a run and are no part of the model."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in a weights file: its name, file, shape, dtype as safetensors spells it ("F32"), and size in bytes."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that hold a folder's model, in order.

    Raises:
        CheckpointError: there are none, or the index names files that are missing or outside of the folder.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"hf_zero: {index} is damaged ({error!r}).") from error
        bad = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if bad:
            raise CheckpointError(f"hf_zero: {index} names {bad[0]!r}, which is not a file of {folder}.")
        return names
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [SAFE_WEIGHTS_NAME]
    raise CheckpointError(f"hf_zero: {folder} holds no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}.")


def saved_tensors(folder: Path) -> list[SavedTensor]:
    """Everything in a folder's weights files, by their headers alone."""
    found = []
    for file in weight_files(folder):
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                    view = opened.get_slice(name)
                    shape = tuple(view.get_shape())
                    tensor = opened.get_tensor(name)
                    found.append(
                        SavedTensor(name=name, file=file, shape=shape, dtype=view.get_dtype(), nbytes=tensor.nbytes)
                    )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"hf_zero: {folder / file} cannot be read ({error}).") from error
    return found


def weight_faults(folder: Path) -> list[str]:
    """What the weights have wrong against the model of the folder's config, in words."""
    if (folder / "adapter_config.json").is_file():
        return []
    try:
        saved = saved_tensors(folder)
    except CheckpointError as error:
        return [str(error).removeprefix("hf_zero: ").rstrip(".")]
    faults = [f"{tensor.name} is empty" for tensor in saved if 0 in tensor.shape]
    names = [tensor.name for tensor in saved]
    faults += [f"{name} is in two files" for name in dict.fromkeys(names) if names.count(name) > 1]
    if not (folder / "config.json").is_file():
        # A checkpoint of ours may be of a model without one; its manifest vouches for the weights.
        if not is_checkpoint_of_ours(folder):
            faults.append("there is no config.json to compare the weights with")
        return faults
    try:
        expected, tied = _expected(folder)
    except CheckpointError as error:
        return [*faults, str(error).removeprefix("hf_zero: ").rstrip(".")]
    for tensor in saved:
        if tensor.name not in expected:
            faults.append(f"{tensor.name} is no tensor of the config's model")
        elif expected[tensor.name] != tensor.shape:
            faults.append(f"{tensor.name} has shape {tensor.shape} and the config's model {expected[tensor.name]}")
    present = set(names)
    for name in expected:
        if name not in present and not (tied.get(name, {name}) & present):
            faults.append(f"{name} is missing")
    return faults


def _expected(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, set[str]]]:
    """Name → shape of what the config's model saves, and name → all names of the tensor that it is tied to."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"hf_zero: {folder / 'config.json'} cannot be read ({reason}).") from error
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None:
        raise CheckpointError(
            f"hf_zero: {folder / 'config.json'} names the architecture {config.architectures}, which transformers has not."
        )
    with torch.device("meta"):
        model = architecture(config)
    model.tie_weights()
    # As save_pretrained names and splits them: a layer's experts are one tensor in the model and many in its files.
    state = revert_weight_conversion(model, model.state_dict(keep_vars=True))
    names_of: dict[int, set[str]] = {}
    for name, value in state.items():
        names_of.setdefault(id(value), set()).add(name)
    return {n: tuple(v.shape) for n, v in state.items()}, {n: names_of[id(v)] for n, v in state.items()}


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Writes the model of a checkpoint as an ordinary Hugging Face folder; returns the weights files' names.

    One output file is held in memory at a time, and nothing of it where the dtype stays.

    Args:
        out: made if it is not there; must hold nothing.
        dtype: of the floating-point weights; None keeps the saved ones.
        on_progress: called with bytes written and bytes in all.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"hf_zero: {out} is not an empty folder; give one that is new or empty.")
    tensors = saved_tensors(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    written_bytes = {tensor.name: _written_bytes(tensor, dtype) for tensor in tensors}
    shards = list(_shards(tensors, written_bytes, max_shard_bytes))
    total = sum(written_bytes.values())
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SAFE_WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(_read(checkpoint, shard, dtype), out / file, metadata={"format": "pt"})
        weight_map.update({tensor.name: file for tensor in shard})
        done += sum(written_bytes[tensor.name] for tensor in shard)
        on_progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    weights = {*weight_files(checkpoint), SAFE_WEIGHTS_INDEX_NAME}
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in weights and not is_of_the_run(path.name):
            shutil.copy2(path, out / path.name)
    if dtype is not None and (out / "config.json").is_file():
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sorted(set(weight_map.values()))


def _written_bytes(tensor: SavedTensor, dtype: torch.dtype | None) -> int:
    if dtype is None or not tensor.dtype.startswith(("F", "BF")):
        return tensor.nbytes
    return torch.Size(tensor.shape).numel() * dtype.itemsize


def _shards(
    tensors: list[SavedTensor], written_bytes: dict[str, int], max_shard_bytes: int
) -> Iterator[list[SavedTensor]]:
    shard: list[SavedTensor] = []
    for tensor in tensors:
        if shard and sum(written_bytes[t.name] for t in [*shard, tensor]) > max_shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    if shard:
        yield shard


def _read(folder: Path, shard: list[SavedTensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    read: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(tensor.file for tensor in shard):
        with safe_open(folder / file, framework="pt") as opened:
            for tensor in shard:
                if tensor.file == file:
                    values = opened.get_tensor(tensor.name)
                    cast = dtype is not None and values.is_floating_point()
                    read[tensor.name] = values.to(dtype) if cast else values
    return read


def is_of_the_run(name: str) -> bool:
    """Whether a file of this name continues or describes a run, and is no part of the model."""
    return name in _OF_THE_RUN or "rng_state" in name


def is_checkpoint_of_ours(folder: Path) -> bool:
    """Whether a folder has a manifest to be held against."""
    return (folder / ZERO_FOLDER).is_dir()
