"""The weights of a folder: what is wrong with them, and writing them anew as `from_pretrained` reads them."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE

from ...checkpoint.foreign.dcp import METADATA_NAME as DCP_METADATA_NAME
from ...checkpoint.foreign.weight_shards import weight_shards_of
from ...checkpoint.format.files import Progress, untold
from ...checkpoint.format.json_files import read_mapping
from ...checkpoint.format.links import link_faults, refuse_links
from ...checkpoint.format.manifest import CheckpointError
from ...checkpoint.format.pieces import Piece, dtype_named, lay_out
from ...checkpoint.structure import POSITION_NAME
from ...checkpoint.verify import checkpoint_faults, in_words
from ...report.log_file import LOG_NAME, PAGE_NAME
from .checkpointing import ZERO_FOLDER
from .config_model import CONFIG_NAME, expected_tensors
from .saved_weights import InFiles, MasterWeights, SavedTensor, is_checkpoint_of_ours, open_weights

ADAPTER_CONFIG_NAME = "adapter_config.json"
"""peft's."""

RUN_NAME = "training_run.json"
"""Settings, set-up and hardware of the run that trained the model, for its card; without paths and secrets."""

MAX_SHARD_BYTES = 5 * 10**9
"""Of one weights file, where nothing else is said."""

_FLOATING = ("F64", "F32", "F16", "BF16")
"""What weights are stored in; eight bits and fewer belong to a `quantization_config`."""

_OF_THE_RUN = (
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "trainer_state.json",
    "training_args.bin",
    POSITION_NAME,
    RUN_NAME,
    LOG_NAME,
    PAGE_NAME,
)
"""Files that continue or describe a run and are no part of the model."""


def folder_faults(folder: Path, on_progress: Progress = untold) -> list[str]:
    """What a checkpoint or model folder has wrong, in words: first by its manifest, then its weights against its config.

    Args:
        on_progress: called with bytes read and bytes in all.
    """
    if is_checkpoint_of_ours(folder) or not folder.is_dir():
        faults = checkpoint_faults(folder, ZERO_FOLDER, on_progress=on_progress)
        if faults:
            return faults
    return list(dict.fromkeys(weight_faults(folder)))


def weight_faults(folder: Path) -> list[str]:
    """What the weights have wrong against the model of the folder's config, in words."""
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        return []
    faults = link_faults(folder)
    if faults:
        # What a link leads to is not looked at.
        return faults
    try:
        with open_weights(folder) as weights:
            saved, as_in_files = weights.tensors, weights.as_in_files
    except CheckpointError as error:
        return [in_words(error)]
    counts = Counter(tensor.name for tensor in saved)
    faults = [f"{tensor.name} is empty" for tensor in saved if 0 in tensor.shape]
    faults += [f"{name} is in two files" for name, count in counts.items() if count > 1]
    if not (folder / CONFIG_NAME).is_file():
        # A checkpoint of ours may be of a model without one; its manifest vouches for the weights.
        if not is_checkpoint_of_ours(folder):
            faults.append(f"there is no {CONFIG_NAME} to compare the weights with")
        return faults
    try:
        expected = expected_tensors(folder, len(saved), as_in_files=as_in_files)
        is_quantised = "quantization_config" in read_mapping(folder / CONFIG_NAME)
    except CheckpointError as error:
        return [*faults, in_words(error)]
    for tensor in saved:
        if tensor.name not in expected:
            faults.append(f"{tensor.name} is no tensor of the config's model")
        elif expected[tensor.name].shape != tensor.shape:
            faults.append(
                f"{tensor.name} has shape {tensor.shape} and the config's model {expected[tensor.name].shape}"
            )
        elif not is_quantised and expected[tensor.name].is_floating != (tensor.dtype in _FLOATING):
            faults.append(f"{tensor.name} has dtype {tensor.dtype}, which the config's model cannot have there")
    shards = weight_shards_of(folder)
    if shards and any(expected[each.name].shape != each.shape for each in saved if each.name in expected):
        faults.insert(0, f"there may be further files after {shards[-1].name}: each rank has written its own")
    faults += [f"{name} is missing" for name, tensor in expected.items() if not tensor.names & counts.keys()]
    return faults


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    others: Sequence[Path] = (),
    masters: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Progress = untold,
) -> list[str]:
    """Writes the model of a checkpoint as an ordinary Hugging Face folder; returns the weights files' names.

    A tensor is in memory at a time.

    Args:
        others: the checkpoint's folders on other hosts' disks.
        masters: the fp32 masters in the place of 16-bit weights.
        out: made if it is not there; must hold nothing.
        dtype: of the floating-point weights; None keeps the saved ones.
        on_progress: called with bytes written and bytes in all.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"hf_zero: {out} is not an empty folder; give one that is new or empty.")
    if (checkpoint / ADAPTER_CONFIG_NAME).is_file():
        raise CheckpointError(
            f"hf_zero: {checkpoint} holds adapters, which PeftModel.from_pretrained reads as they are; there is no whole model "
            "to write. Merge them into their base (merge_and_unload) for one."
        )
    if masters and not is_checkpoint_of_ours(checkpoint):
        raise CheckpointError(f"hf_zero: {checkpoint} is no checkpoint of ours, so it has no masters.")
    copied = [path for path in sorted(checkpoint.iterdir()) if path.is_file() and not is_of_the_run(path.name)]
    refuse_links(checkpoint, copied)
    opened = open_weights(checkpoint, others)
    if not opened.as_in_files and (checkpoint / CONFIG_NAME).is_file():
        opened = InFiles(opened, checkpoint)
    with MasterWeights(opened, checkpoint, others) if masters else opened as weights:
        out.mkdir(parents=True, exist_ok=True)
        shards = list(_shards(weights.tensors, dtype, max_shard_bytes))
        total = sum(_written_bytes(tensor, dtype) for tensor in weights.tensors)
        done = 0
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = (
                SAFETENSORS_SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            )
            places = {tensor.name: (_written_dtype(tensor, dtype), tensor.shape) for tensor in shard}
            begins = lay_out(out / file, places, {"format": "pt"})
            for tensor in shard:
                values = weights.read(tensor).to(_written_dtype(tensor, dtype)).reshape(-1)
                Piece(path=out / file, offset=begins[tensor.name], values=values).write()
                done += values.nbytes
                on_progress(done, total)
            weight_map.update({tensor.name: file for tensor in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / SAFETENSORS_INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    of_weights = {SAFETENSORS_INDEX_FILE, *(tensor.file for tensor in weights.tensors)}
    of_weights |= {path.name for path in weight_shards_of(checkpoint)}
    for path in copied:
        if path.name not in of_weights:
            shutil.copy2(path, out / path.name)
    if (dtype is not None or masters) and (out / CONFIG_NAME).is_file():
        config = read_mapping(out / CONFIG_NAME)
        config["dtype"] = str(dtype or torch.float32).removeprefix("torch.")
        (out / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sorted(set(weight_map.values()))


def _written_dtype(tensor: SavedTensor, dtype: torch.dtype | None) -> torch.dtype:
    saved = dtype_named(tensor.dtype)
    return saved if dtype is None or not saved.is_floating_point else dtype


def _written_bytes(tensor: SavedTensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * _written_dtype(tensor, dtype).itemsize


def _shards(tensors: list[SavedTensor], dtype: torch.dtype | None, max_shard_bytes: int) -> Iterator[list[SavedTensor]]:
    shard: list[SavedTensor] = []
    for tensor in tensors:
        if shard and sum(_written_bytes(t, dtype) for t in [*shard, tensor]) > max_shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    if shard:
        yield shard


def is_of_the_run(name: str) -> bool:
    """Whether a file of this name continues or describes a run, and is no part of the model."""
    return name in _OF_THE_RUN or name == DCP_METADATA_NAME or name.endswith(".distcp") or "rng_state" in name
