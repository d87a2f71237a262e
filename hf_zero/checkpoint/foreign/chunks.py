"""Tensors of another engine's checkpoint that lie in boxes in several files, read box by box."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...layout.boxes import Box
from ...layout.intervals import Interval
from ..format.blocks import SavedBlock, read_blocks
from ..format.manifest import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        offsets, sizes: of the box in the tensor, one a dimension.
        file: name below the folder.
        load: what it holds; raises `CheckpointError` where it cannot be read.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    load: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class SavedEntry:
    """A tensor, or with shape None a plain value, and where its bytes lie."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


class ChunkedFolder:
    """What a folder holds.

    Attributes:
        entries: path in the saved dictionary, such as `("optimizer", "state", "lm_head.weight", "exp_avg")` → what is there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[tuple[Any, ...], SavedEntry] = {}
        self._covered: set[tuple[Any, ...]] = set()

    def read(self, path: tuple[Any, ...], interval: Interval, box: Box | None = None) -> torch.Tensor:
        """The elements `interval`, row-major, of a part of a tensor; only chunks that hold some of its rows are read. 1-D.

        Args:
            box: the part; None is all of the tensor.

        Raises:
            CheckpointError: an element is in no chunk or in two, or a file is missing, cut off or damaged.
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
            raise self._damaged(path, "has a chunk of another shape than its metadata says")
        return values.reshape(chunk.sizes or (1,))

    def refuse_uncovered(self, path: tuple[Any, ...]) -> None:
        """Raises `CheckpointError` unless the chunks of a tensor hold each of its elements once, by their boxes alone."""
        if path in self._covered:
            return
        entry = self.entries[path]
        shape = entry.shape or (1,)
        boxes = [(chunk.offsets or (0,), chunk.sizes or (1,)) for chunk in entry.chunks if 0 not in chunk.sizes]
        if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
            raise self._damaged(path, "has a chunk of another number of dimensions")
        # Between neighbouring cuts all elements are in the same chunks, so that one of them stands for all.
        cuts = [
            sorted({0, size, *(o[dim] for o, _ in boxes), *(o[dim] + s[dim] for o, s in boxes)})
            for dim, size in enumerate(shape)
        ]
        if any(of_dim[0] < 0 or of_dim[-1] > size for of_dim, size in zip(cuts, shape)):
            raise self._damaged(path, "has a chunk beyond its end")
        place = [{cut: number for number, cut in enumerate(of_dim)} for of_dim in cuts]
        times = torch.zeros([len(of_dim) - 1 for of_dim in cuts], dtype=torch.int32)
        for offsets, sizes in boxes:
            times[tuple(slice(at[o], at[o + s]) for at, o, s in zip(place, offsets, sizes))] += 1
        if not bool((times == 1).all()):
            found = sum(math.prod(sizes) for _, sizes in boxes)
            raise self._damaged(
                path, f"has {found} of {math.prod(shape)} elements in its chunks, or some of them in two chunks"
            )
        self._covered.add(path)

    def _damaged(self, path: tuple[Any, ...], fault: str) -> CheckpointError:
        return CheckpointError(
            f"hf_zero: {self.folder}: {'.'.join(map(str, path))} {fault}; the checkpoint is damaged or lacks a rank's file, "
            "resume from another."
        )
