"""One folder of torch.distributed.checkpoint: tensors by their path in the saved dictionary, read chunk by chunk."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...layout.boxes import Box
from ...layout.intervals import Interval
from ..format.blocks import SavedBlock, read_blocks
from ..format.files import is_inside
from ..format.manifest import CheckpointError
from .pickles import Record, load_dcp_metadata, load_stream

_VERSIONS = (None, "1.0.0")


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A box of a tensor in a part of a file.

    Attributes:
        offsets, sizes: of the box in the tensor, one a dimension.
        file: name below the folder.
        start, length: of its bytes in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class SavedEntry:
    """A tensor, or with shape None a plain value, and where its bytes lie."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[_Chunk, ...]


class DcpFolder:
    """The entries of one DCP folder by path, such as `("optimizer", "state", "lm_head.weight", "exp_avg")`.

    Raises:
        CheckpointError: not finished, damaged, or written with settings that are not covered.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        metadata = load_dcp_metadata(folder / ".metadata").fields
        if metadata.get("version") not in _VERSIONS:
            raise CheckpointError(
                f"hf_zero: {folder} has DCP version {metadata['version']!r}, and {_VERSIONS[-1]} is known. Continue it with FSDP."
            )
        paths = metadata.get("planner_data") or {}
        places = self._places(metadata.get("storage_data") or {})
        self.entries: dict[tuple[Any, ...], SavedEntry] = {}
        self._covered: set[tuple[Any, ...]] = set()
        for key, entry in metadata["state_dict_metadata"].items():
            path = paths.get(key)
            if not isinstance(path, tuple):
                raise CheckpointError(
                    f"hf_zero: {folder} was not written with DefaultSavePlanner ({key!r} has no path), which is not covered. "
                    "Continue it with FSDP."
                )
            self.entries[path] = self._entry(key, entry, places)
        self._refuse_short_files()

    def value(self, path: tuple[Any, ...]) -> Any:
        """A plain value, or a tensor of one element as it was saved."""
        [chunk] = self.entries[path].chunks
        return self._load(chunk)

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
        self._refuse_uncovered(path)
        blocks = (
            SavedBlock(offsets=chunk.offsets or (0,), sizes=chunk.sizes or (1,), load=partial(self._block, path, chunk))
            for chunk in entry.chunks
        )
        return read_blocks(box, interval, blocks)

    def _block(self, path: tuple[Any, ...], chunk: _Chunk) -> torch.Tensor:
        values = self._load(chunk)
        if not torch.is_tensor(values) or tuple(values.shape) != chunk.sizes:
            raise self._damaged(path, "has a chunk of another shape than its metadata says")
        return values.reshape(chunk.sizes or (1,))

    def _refuse_uncovered(self, path: tuple[Any, ...]) -> None:
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

    def _places(self, storage: dict[Record, Record]) -> dict[tuple[str, tuple[int, ...] | None], Record]:
        places = {}
        for index, info in storage.items():
            offset = index.fields.get("offset")
            places[index.fields["fqn"], None if offset is None else tuple(offset)] = info
        return places

    def _entry(self, key: str, entry: Record, places: dict[Any, Record]) -> SavedEntry:
        if "chunks" not in entry.fields:
            place = places.get((key, None))
            return SavedEntry(shape=None, dtype=None, chunks=(self._chunk(key, (), (), place),))
        boxes = [(tuple(box.fields["offsets"]), tuple(box.fields["sizes"])) for box in entry.fields["chunks"]]
        return SavedEntry(
            shape=tuple(entry.fields["size"]),
            dtype=_dtype_of(entry),
            chunks=tuple(self._chunk(key, offsets, sizes, places.get((key, offsets))) for offsets, sizes in boxes),
        )

    def _chunk(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Record | None) -> _Chunk:
        if place is None:
            raise CheckpointError(
                f"hf_zero: {self.folder}/.metadata does not say where {key!r} lies; it is damaged, resume from another "
                "checkpoint."
            )
        fields = place.fields
        if fields.get("transform_descriptors"):
            raise CheckpointError(
                f"hf_zero: {self.folder} was written with transforms ({fields['transform_descriptors']}), which are not covered. "
                "Continue it with FSDP."
            )
        file = fields["relative_path"]
        if not is_inside(file):
            raise CheckpointError(
                f"hf_zero: {self.folder}/.metadata names {file!r}, which is not a file of that folder."
            )
        return _Chunk(offsets=offsets, sizes=sizes, file=file, start=fields["offset"], length=fields["length"])

    def _refuse_short_files(self) -> None:
        ends: dict[str, int] = {}
        for entry in self.entries.values():
            for chunk in entry.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        for file, end in ends.items():
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(
                    f"hf_zero: {path} is missing. Each rank writes its own file: copy all of them into one folder."
                )
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"hf_zero: {path} is cut off: it has {path.stat().st_size} of {end} bytes. Resume from another checkpoint."
                )

    def _load(self, chunk: _Chunk) -> Any:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                content = file.read(chunk.length)
        except OSError as error:
            raise CheckpointError(
                f"hf_zero: {path} cannot be read ({error}). Resume from another checkpoint."
            ) from error
        return load_stream(content, path)

    def _damaged(self, path: tuple[Any, ...], fault: str) -> CheckpointError:
        return CheckpointError(
            f"hf_zero: {self.folder}: {'.'.join(map(str, path))} {fault}; the checkpoint is damaged, resume from another."
        )


def _dtype_of(entry: Record) -> torch.dtype | None:
    properties = entry.fields.get("properties")
    if not isinstance(properties, Record):
        return None
    values = (*properties.unnamed, *properties.fields.values())
    return next((value for value in values if isinstance(value, torch.dtype)), None)
