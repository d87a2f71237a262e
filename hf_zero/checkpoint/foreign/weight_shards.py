"""Weights that transformers saved with `save_pretrained(..., distributed_checkpoint=True)`: a safetensors file a rank."""

import json
import re
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..format.manifest import CheckpointError
from ..format.pieces import dtype_named
from .chunks import Chunk, ChunkedFolder, SavedEntry

_NAME = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")
_OFFSETS = "DCP_SHARDING_INFO"
_THEN = "Resume from another checkpoint."


def weight_shards_of(folder: Path) -> list[Path]:
    """The files of such weights in a folder; none where there is no folder."""
    return sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name))


class WeightShards(ChunkedFolder):
    """Each file says where in the whole tensors its boxes begin; nothing says how large tensors are, or how many files there are.

    The last ranks' files may so be missing without a gap. Whoever reads a tensor compares its shape first: with the model, its
    config or the optimizer's state.

    Args:
        root: under which the entries are.

    Attributes:
        weights: name → shape and dtype.

    Raises:
        CheckpointError: a file before the last is missing, is cut off, or does not say what it holds.
    """

    def __init__(self, folder: Path, root: str):
        super().__init__(folder)
        self.weights: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        found: dict[str, _Found] = {}
        for number, path in enumerate(weight_shards_of(folder), start=1):
            if int(path.name.split("-")[1]) != number:
                raise CheckpointError(
                    f"hf_zero: {folder} has no shard-{number:05}-model-….safetensors, and has {path.name}. Each rank writes its "
                    "own file: copy all of them into one folder."
                )
            _add_chunks(found, path)
        for name, tensor in found.items():
            ends = ([offset + size for offset, size in zip(chunk.offsets, chunk.sizes)] for chunk in tensor.chunks)
            shape = tuple(max(of_dim) for of_dim in zip(*ends))
            if len(tensor.dtypes) > 1:
                raise CheckpointError(
                    f"hf_zero: {folder}: {name!r} has several dtypes, {sorted(map(str, tensor.dtypes))}: the files are not "
                    "of one save. Copy those of one save into a folder of their own."
                )
            [dtype] = tensor.dtypes
            self.weights[name] = (shape, dtype)
            self.entries[root, name] = SavedEntry(shape=shape, dtype=dtype, chunks=tuple(tensor.chunks))


@dataclass
class _Found:
    """What the files have of a tensor."""

    chunks: list[Chunk] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)


def _add_chunks(found: dict[str, _Found], path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            said = (file.metadata() or {}).get(_OFFSETS)
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            held = {name: (tuple(view.get_shape()), dtype_named(view.get_dtype())) for name, view in views.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"hf_zero: {path} is cut off or damaged ({error}). {_THEN}") from error
    if said is None:
        raise CheckpointError(
            f"hf_zero: {path} does not say which parts of the weights it holds ({_OFFSETS} is not in its header). Save it "
            "with save_pretrained(..., distributed_checkpoint=True)."
        )
    offsets = _offsets_of(said, path)
    for name, (sizes, dtype) in held.items():
        if name not in offsets or len(offsets[name]) != len(sizes):
            raise CheckpointError(
                f"hf_zero: {path} does not say which part of {name!r} it holds ({_OFFSETS} in its header). {_THEN}"
            )
        tensor = found.setdefault(name, _Found())
        tensor.dtypes.add(dtype)
        tensor.chunks.append(Chunk(offsets=offsets[name], sizes=sizes, file=path.name, load=partial(_load, path, name)))


def _offsets_of(said: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Where each tensor's box begins, by name."""
    try:
        return {name: tuple(map(index, place["saved_offsets"])) for name, place in json.loads(said).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"hf_zero: {path}: {_OFFSETS} in its header is damaged ({error!r}). {_THEN}") from error


def _load(path: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"hf_zero: {path} cannot be read ({error}). {_THEN}") from error
