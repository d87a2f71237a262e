"""The weights of a Hugging Face folder: which tensor lies in which file, what is wrong with them, and writing them anew."""

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from ...buckets.rows import MASTER
from ...checkpoint.foreign.dcp import METADATA_NAME as DCP_METADATA_NAME
from ...checkpoint.foreign.find import is_foreign, open_foreign
from ...checkpoint.format.files import Progress, is_inside, untold
from ...checkpoint.format.json_files import read_mapping
from ...checkpoint.format.links import link_faults, refuse_links
from ...checkpoint.format.manifest import WEIGHTS, CheckpointError
from ...checkpoint.format.pieces import DTYPE_NAMES, Piece, dtype_named, lay_out
from ...checkpoint.reader import CheckpointReader
from ...checkpoint.structure import POSITION_NAME
from ...checkpoint.verify import checkpoint_faults, in_words, newest_first
from ...layout.boxes import Box
from ...layout.intervals import Interval
from ...report.log_file import LOG_NAME, PAGE_NAME
from .checkpointing import ZERO_FOLDER
from .config_model import CONFIG_NAME, expected_tensors
from .row_weights import has_row_weights

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
    if not folder.is_dir():
        raise CheckpointError(f"hf_zero: there is no folder {folder}.")
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        refuse_links(folder, [index])
        weight_map = read_mapping(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"hf_zero: {index} is damaged: its weight_map is no mapping from tensors to files.")
        names = sorted(set(weight_map.values()))
        bad = [n for n in names if not is_inside(n) or Path(n).name != n or not (folder / n).is_file()]
        if bad:
            raise CheckpointError(f"hf_zero: {index} names {bad[0][:200]!r}, which is not a file of {folder}.")
        return names
    for name in (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME):
        if (folder / name).is_file():
            return [name]
    newest = next(newest_first(folder), None)
    inside = "" if newest is None else f"; {newest.name} is inside, so give {newest}"
    raise CheckpointError(f"hf_zero: {folder} holds no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}{inside}.")


def saved_tensors(folder: Path) -> list[SavedTensor]:
    """Everything that a folder holds of a model, by headers and manifest alone."""
    with open_weights(folder) as weights:
        return weights.tensors


class Weights(ABC):
    """A folder's model, a tensor at a time. A context manager.

    Attributes:
        tensors: all that it has.
    """

    tensors: list[SavedTensor]

    @abstractmethod
    def read(self, tensor: SavedTensor) -> torch.Tensor:
        """Its values, in its shape, in host memory or mapped from a file."""

    def __enter__(self) -> "Weights":
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


class FileWeights(Weights):
    """In files that `from_pretrained` reads."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.tensors = []
        for file in weight_files(folder):
            refuse_links(folder, [folder / file])
            try:
                opened = self._files[file] = self._stack.enter_context(safe_open(folder / file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                    view = opened.get_slice(name)
                    shape = tuple(view.get_shape())
                    nbytes = opened.get_tensor(name).nbytes
                    self.tensors.append(
                        SavedTensor(name=name, file=file, shape=shape, dtype=view.get_dtype(), nbytes=nbytes)
                    )
            except Exception as error:
                # Of a header that is no header, which of its errors safetensors raises is its own matter.
                self._stack.close()
                raise CheckpointError(f"hf_zero: {folder / file} cannot be read ({error}).") from error

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        return self._files[tensor.file].get_tensor(tensor.name)

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._stack.close()


class RowWeights(Weights):
    """In the ranks' rows of a checkpoint of layout `sharded`.

    Args:
        others: the checkpoint's folders on other hosts' disks.
    """

    def __init__(self, checkpoint: Path, others: Sequence[Path] = ()):
        self._reader = CheckpointReader(checkpoint / ZERO_FOLDER, [other / ZERO_FOLDER for other in others])
        self.tensors = [
            SavedTensor(
                name=name,
                file=ZERO_FOLDER,
                shape=weight.shape,
                dtype=weight.dtype,
                nbytes=math.prod(weight.shape) * dtype_named(weight.dtype).itemsize,
            )
            for name, weight in self._reader.manifest.weights.items()
        ]

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        return self._reader.read(WEIGHTS, tensor.name, Interval(0, math.prod(tensor.shape))).view(tensor.shape)

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)


class ForeignWeights(Weights):
    """In a checkpoint of DeepSpeed ZeRO or FSDP; trained ones in the precision of the optimizer's own values."""

    def __init__(self, folder: Path):
        self._foreign = open_foreign(folder)
        self.tensors = []
        for name, shape in self._foreign.weight_shapes().items():
            dtype = self._foreign.weight_dtype(name)
            self.tensors.append(
                SavedTensor(
                    name=name,
                    file=folder.name,
                    shape=shape,
                    dtype=DTYPE_NAMES[dtype],
                    nbytes=math.prod(shape) * dtype.itemsize,
                )
            )

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        whole = self._foreign.read_weight(tensor.name, Box.whole(tensor.shape), Interval(0, math.prod(tensor.shape)))
        return whole.view(tensor.shape)

    def __exit__(self, *error: object) -> None:
        pass


class MasterWeights(Weights):
    """The fp32 masters of a run in 16 bits, and the weights of what has none.

    Args:
        weights: of the same checkpoint; closed with this.
    """

    def __init__(self, weights: Weights, checkpoint: Path, others: Sequence[Path] = ()):
        self._weights = weights
        self._reader = CheckpointReader(checkpoint / ZERO_FOLDER, [other / ZERO_FOLDER for other in others])
        manifest = self._reader.manifest
        self._mastered = {name for name, kinds in manifest.kinds.items() if MASTER in kinds}
        nameless = sorted(self._mastered - {tensor.name for tensor in weights.tensors})
        if nameless:
            raise CheckpointError(
                f"hf_zero: {checkpoint} has a master of {nameless[0]!r}, which is no name of its weights."
            )
        self.tensors = [
            replace(tensor, dtype="F32", nbytes=4 * math.prod(tensor.shape))
            if tensor.name in self._mastered
            else tensor
            for tensor in weights.tensors
        ]

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        if tensor.name not in self._mastered:
            return self._weights.read(tensor)
        return self._reader.read(MASTER, tensor.name, Interval(0, math.prod(tensor.shape))).view(tensor.shape)

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)
        self._weights.__exit__(*error)


def open_weights(folder: Path, others: Sequence[Path] = ()) -> Weights:
    """A folder's model, wherever it lies."""
    if has_row_weights(folder):
        return RowWeights(folder, others)
    is_plain = is_checkpoint_of_ours(folder) or any(folder.glob("*.safetensors"))
    return FileWeights(folder) if is_plain or not is_foreign(folder) else ForeignWeights(folder)


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
        saved = saved_tensors(folder)
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
        expected = expected_tensors(folder, len(saved))
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
    with MasterWeights(opened, checkpoint, others) if masters else opened as weights:
        out.mkdir(parents=True, exist_ok=True)
        shards = list(_shards(weights.tensors, dtype, max_shard_bytes))
        total = sum(_written_bytes(tensor, dtype) for tensor in weights.tensors)
        done = 0
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = SAFE_WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
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
        (out / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    of_weights = {SAFE_WEIGHTS_INDEX_NAME, *(tensor.file for tensor in weights.tensors)}
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


def is_checkpoint_of_ours(folder: Path) -> bool:
    """Whether a folder has a manifest to be held against."""
    return (folder / ZERO_FOLDER).is_dir()
