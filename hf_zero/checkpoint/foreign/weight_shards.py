"""Weights that transformers saved with `save_pretrained(..., distributed_checkpoint=True)`: a safetensors file a rank."""

import json
import re
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..format.manifest import CheckpointError
from .chunks import Chunk, ChunkedFolder, SavedEntry

_NAME = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")
_OFFSETS = "DCP_SHARDING_INFO"


def weight_shards_of(folder: Path) -> list[Path]:
    """The files of such weights in a folder."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


class WeightShards(ChunkedFolder):
    """Each file says where in the whole tensors its boxes begin; nothing says how many files there are, or how large tensors are.

    Args:
        root: under which the entries are.

    Raises:
        CheckpointError: a file is missing, or does not say what it holds.
    """

    def __init__(self, folder: Path, root: str):
        super().__init__(folder)
        chunks: dict[str, list[Chunk]] = {}
        for number, path in enumerate(weight_shards_of(folder), start=1):
            if int(path.name.split("-")[1]) != number:
                raise CheckpointError(
                    f"hf_zero: {folder} has no shard-{number:05}-model-….safetensors, and has {path.name}. Each rank writes its "
                    "own file: copy all of them into one folder."
                )
            for name, chunk in _chunks_of(path):
                chunks.setdefault(name, []).append(chunk)
        for name, found in chunks.items():
            ends = ([offset + size for offset, size in zip(chunk.offsets, chunk.sizes)] for chunk in found)
            shape = tuple(max(of_dim) for of_dim in zip(*ends))
            self.entries[root, name] = SavedEntry(shape=shape, dtype=None, chunks=tuple(found))


def _chunks_of(path: Path) -> list[tuple[str, Chunk]]:
    with safe_open(path, framework="pt") as file:
        said = (file.metadata() or {}).get(_OFFSETS)
        if said is None:
            raise CheckpointError(
                f"hf_zero: {path} does not say which parts of the weights it holds ({_OFFSETS} is not in its header). Save it "
                "with save_pretrained(..., distributed_checkpoint=True)."
            )
        offsets = {name: tuple(place["saved_offsets"]) for name, place in json.loads(said).items()}
        return [
            (
                name,
                Chunk(
                    offsets=offsets[name],
                    sizes=tuple(file.get_slice(name).get_shape()),
                    file=path.name,
                    load=partial(_load, path, name),
                ),
            )
            for name in file.keys()  # noqa: SIM118
        ]


def _load(path: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"hf_zero: {path} cannot be read ({error}). Resume from another checkpoint.") from error
