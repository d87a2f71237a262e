"""States in checkpoints of other engines, in chunks and shards."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..checkpoint.faults import CheckpointError, read_fault
from ..checkpoint.mapped_tensors import dtype_named
from ..checkpoint.origin import weight_shards_of
from ..checkpoint.saved_blocks import SavedBlock, read_blocks
from ..layout.boxes import Box
from ..layout.intervals import Interval

# ---- Tensors of another engine's checkpoint, stored as boxes in several files ----


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        offsets, sizes: offset and size of the box in the tensor, for each dimension.
        file: name relative to the folder.
        load: returns the values; raises `CheckpointError` if they cannot be read.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    load: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class SavedEntry:
    """A tensor, or with shape None a plain value, and the location of its bytes."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


class ChunkedFolder:
    """The contents of a folder of chunks.

    Attributes:
        entries: path in the saved dictionary, such as `("optimizer", "state", "lm_head.weight", "exp_avg")` → saved entry.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[tuple[Any, ...], SavedEntry] = {}
        self._covered: set[tuple[Any, ...]] = set()

    def read(self, path: tuple[Any, ...], interval: Interval, box: Box | None = None) -> torch.Tensor:
        """Returns the elements `interval`, row-major, of a part of a tensor, as a 1-D tensor. Reads only chunks with such
        elements.

        Args:
            box: the part; None is the whole tensor.

        Raises:
            CheckpointError: an element is in no chunk or in two, or a file is missing, truncated or damaged.
        """
        entry = self.entries[path]
        shape = entry.shape or (1,)
        if box is None or box.is_whole:
            box = Box.whole(shape)
        self.refuse_uncovered(path)
        blocks = (
            SavedBlock(offsets=chunk.offsets or (0,), sizes=chunk.sizes or (1,), load=partial(self._block, path, chunk))
            for chunk in entry.chunks
        )
        return read_blocks(box, interval, blocks)

    def _block(self, path: tuple[Any, ...], chunk: Chunk) -> torch.Tensor:
        values = chunk.load()
        if not torch.is_tensor(values) or tuple(values.shape) != chunk.sizes:
            raise self._damaged(path, "has a chunk with a different shape than in its metadata")
        return values.reshape(chunk.sizes or (1,))

    def refuse_uncovered(self, path: tuple[Any, ...]) -> None:
        """Raises `CheckpointError` unless each element of a tensor is in exactly one chunk, judging by the boxes only."""
        if path in self._covered:
            return
        entry = self.entries[path]
        shape = entry.shape or (1,)
        boxes = [(chunk.offsets or (0,), chunk.sizes or (1,)) for chunk in entry.chunks if 0 not in chunk.sizes]
        if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
            raise self._damaged(path, "has a chunk with a different number of dimensions")
        # All elements between neighboring cuts are in the same chunks, so check one of them.
        cuts = [
            sorted({0, size, *(o[dim] for o, _ in boxes), *(o[dim] + s[dim] for o, s in boxes)})
            for dim, size in enumerate(shape)
        ]
        if any(of_dim[0] < 0 or of_dim[-1] > size for of_dim, size in zip(cuts, shape)):
            raise self._damaged(path, "has a chunk beyond its end")
        numbers = [{cut: number for number, cut in enumerate(of_dim)} for of_dim in cuts]
        times = torch.zeros([len(of_dim) - 1 for of_dim in cuts], dtype=torch.int32)
        for offsets, sizes in boxes:
            times[tuple(slice(at[o], at[o + s]) for at, o, s in zip(numbers, offsets, sizes))] += 1
        if not bool((times == 1).all()):
            found = sum(math.prod(sizes) for _, sizes in boxes)
            raise self._damaged(
                path, f"has {found} of {math.prod(shape)} elements in its chunks, or two chunks share elements"
            )
        self._covered.add(path)

    def _damaged(self, path: tuple[Any, ...], fault: str) -> CheckpointError:
        return CheckpointError(
            f"hf_zero: {self.folder}: {'.'.join(map(str, path))} {fault}; the checkpoint is damaged or lacks a rank's file, "
            "resume from another."
        )


# ---- The interface of a foreign checkpoint, with the same questions as a checkpoint of hf_zero ----

MASTER = "master"
"""The kind of the trained values, in the precision in which the optimizer kept them."""


@dataclass(frozen=True, kw_only=True)
class ForeignGroup:
    """A group of the saved optimizer: its settings (learning rate, betas, …) and the names of its parameters."""

    settings: dict[str, Any]
    names: tuple[str, ...]


class ForeignCheckpoint(ABC):
    """Masters and optimizer state by parameter and interval.

    Attributes:
        folder: the given folder, for messages.
        origin: description of the writer ("DeepSpeed 0.19.8, ZeRO stage 2, 4 ranks").
        shapes: trained parameter → shape of the whole tensor.
        groups: groups of the saved optimizer, in its order; groups without parameters are left out.
    """

    folder: Path
    origin: str
    shapes: dict[str, tuple[int, ...]]
    groups: tuple[ForeignGroup, ...]
    _others: dict[str, torch.Tensor] | None = None

    @abstractmethod
    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Returns the kinds with one value for each element of this parameter, `MASTER` included."""

    @abstractmethod
    def scalars_of(self, name: str) -> dict[str, Any]:
        """Returns the state with one value for the whole parameter (`step`)."""

    @abstractmethod
    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        """Returns the elements `interval` of one kind of one parameter, as a 1-D host tensor with its own memory.

        Raises:
            CheckpointError: the bytes are missing or cannot be read.
        """

    def read_part(self, kind: str, name: str, box: Box, interval: Interval) -> torch.Tensor:
        """Reads elements of a part of the parameter; `interval` refers to the part."""
        if box.is_whole:
            return self.read(kind, name, interval)
        runs = box.runs(interval)
        return torch.cat([self.read(kind, name, Interval(start, start + run.numel)) for run, start in runs])

    @abstractmethod
    def other_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole frozen parameters and buffers, by their names in the model."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all weights of the model, whole; trained ones as the optimizer kept them."""
        for name, shape in self.shapes.items():
            yield name, self.read(MASTER, name, Interval(0, torch.Size(shape).numel())).view(shape)
        yield from self.other_weights()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each whole weight of the model, by name."""
        return self.shapes | {name: tuple(value.shape) for name, value in self.other_weights()}

    def weight_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of `read_weight` for a weight."""
        return self.read_weight(name, Box.whole(self.weight_shapes()[name]), Interval(0, 1)).dtype

    def read_weight(self, name: str, box: Box, interval: Interval) -> torch.Tensor:
        """Returns the elements `interval` of a part of a weight, 1-D; a trained weight with the optimizer's precision."""
        if name in self.shapes:
            return self.read_part(MASTER, name, box, interval)
        if self._others is None:
            self._others = dict(self.other_weights())
        flat = self._others[name].reshape(-1)
        runs = [flat[start : start + run.numel] for run, start in box.runs(interval)]
        return torch.cat(runs) if runs else flat[:0]

    def check_names(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises `CheckpointError` unless the checkpoint trains exactly these parameters, with these shapes."""
        for name in shapes:
            if name not in self.shapes:
                raise self._other(f"{name!r} is trained in this run but not in the checkpoint")
        for name, saved in self.shapes.items():
            if name not in shapes:
                raise self._other(f"{name!r} is trained in the checkpoint but not in this run")
            if saved != tuple(shapes[name]):
                raise self._other(
                    f"{name!r} has shape {saved} in the checkpoint and {tuple(shapes[name])} in the model"
                )

    def _other(self, fault: str) -> CheckpointError:
        return CheckpointError(
            f"hf_zero: {self.folder} ({self.origin}): {fault}. Resume with the model and the frozen parameters that the "
            "checkpoint was made with."
        )


# ---- Weights of `save_pretrained(..., distributed_checkpoint=True)`: one safetensors file for each rank ----

_OFFSETS = "DCP_SHARDING_INFO"
_THEN = "Resume from another checkpoint."


class WeightShards(ChunkedFolder):
    """Files with boxes of whole tensors. Each file records the offsets of its boxes, but not the sizes of tensors or the file
    count.

    So the files of the last ranks may be missing without a visible gap. Code that reads a tensor must first compare its shape
    with the model, the config or the optimizer's state.

    Args:
        root: prefix of the entries.

    Attributes:
        weights: name → shape and dtype.

    Raises:
        CheckpointError: a file before the last one is missing, truncated, or does not describe its contents.
    """

    def __init__(self, folder: Path, root: str):
        super().__init__(folder)
        self.weights: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        found: dict[str, _Found] = {}
        for number, path in enumerate(weight_shards_of(folder), start=1):
            if int(path.name.split("-")[1]) != number:
                raise CheckpointError(
                    f"hf_zero: {folder} has no shard-{number:05}-model-….safetensors, but has {path.name}. Each rank writes "
                    "its own file: copy all of them into one folder."
                )
            _add_chunks(found, path)
        for name, tensor in found.items():
            ends = ([offset + size for offset, size in zip(chunk.offsets, chunk.sizes)] for chunk in tensor.chunks)
            shape = tuple(max(of_dim) for of_dim in zip(*ends))
            if len(tensor.dtypes) > 1:
                raise CheckpointError(
                    f"hf_zero: {folder}: {name!r} has several dtypes, {sorted(map(str, tensor.dtypes))}: the files are not "
                    "from one save. Copy the files of one save into a separate folder."
                )
            [dtype] = tensor.dtypes
            self.weights[name] = (shape, dtype)
            self.entries[root, name] = SavedEntry(shape=shape, dtype=dtype, chunks=tuple(tensor.chunks))


@dataclass
class _Found:
    """The parts of a tensor in the files."""

    chunks: list[Chunk] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)


def _add_chunks(found: dict[str, _Found], path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            said = (file.metadata() or {}).get(_OFFSETS)
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            held = {name: (tuple(view.get_shape()), dtype_named(view.get_dtype())) for name, view in views.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"hf_zero: {path} {read_fault(error)}. {_THEN}") from error
    if said is None:
        raise CheckpointError(
            f"hf_zero: {path} does not state which parts of the weights it holds ({_OFFSETS} is not in its header). Save it "
            "with save_pretrained(..., distributed_checkpoint=True)."
        )
    offsets = _offsets_of(said, path)
    for name, (sizes, dtype) in held.items():
        if name not in offsets or len(offsets[name]) != len(sizes):
            raise CheckpointError(
                f"hf_zero: {path} does not state which part of {name!r} it holds ({_OFFSETS} in its header). {_THEN}"
            )
        tensor = found.setdefault(name, _Found())
        tensor.dtypes.add(dtype)
        tensor.chunks.append(Chunk(offsets=offsets[name], sizes=sizes, file=path.name, load=partial(_load, path, name)))


def _offsets_of(said: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the offsets of each tensor's box, by name."""
    try:
        return {name: tuple(map(index, chunk["saved_offsets"])) for name, chunk in json.loads(said).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"hf_zero: {path}: {_OFFSETS} in its header is damaged ({error!r}). {_THEN}") from error


def _load(path: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"hf_zero: {path} cannot be read ({error}). {_THEN}") from error
