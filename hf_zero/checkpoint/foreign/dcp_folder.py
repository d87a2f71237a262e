"""One folder of torch.distributed.checkpoint: tensors by their path in the saved dictionary, read chunk by chunk."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...layout.intervals import Interval
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

    def read(self, path: tuple[Any, ...], interval: Interval) -> torch.Tensor:
        """The elements `interval`, row-major, of a tensor; only chunks that hold some of its rows are read. 1-D.

        Raises:
            CheckpointError: an element is in no chunk or in two, or a file is missing, cut off or damaged.
        """
        entry = self.entries[path]
        shape = entry.shape or (1,)
        row_numel = math.prod(shape[1:])
        if interval.numel == 0 or row_numel == 0:
            return torch.empty(0)
        rows = Interval(interval.start // row_numel, -(-interval.stop // row_numel))
        buffer: torch.Tensor | None = None
        found_numel = 0
        for chunk in entry.chunks:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            common = Interval(offsets[0], offsets[0] + sizes[0]).intersect(rows)
            if common is None or 0 in sizes:
                continue
            values = self._load(chunk)
            if not torch.is_tensor(values) or tuple(values.shape) != chunk.sizes:
                raise self._damaged(path, "has a chunk of another shape than its metadata says")
            values = values.reshape(sizes)[common.start - offsets[0] : common.stop - offsets[0]]
            if buffer is None:
                buffer = torch.empty((rows.numel, *shape[1:]), dtype=values.dtype)
            box = (
                slice(common.start - rows.start, common.stop - rows.start),
                *(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:])),
            )
            buffer[box] = values
            found_numel += values.numel()
        if buffer is None or found_numel != buffer.numel():
            raise self._damaged(path, f"has {found_numel} of {rows.numel * row_numel} elements in its chunks")
        first = interval.start - rows.start * row_numel
        return buffer.reshape(-1)[first : first + interval.numel]

    def _places(self, storage: dict[Record, Record]) -> dict[tuple[str, tuple[int, ...] | None], Record]:
        places = {}
        for index, info in storage.items():
            offset = index.fields.get("offset")
            places[index.fields["fqn"], None if offset is None else tuple(offset)] = info
        return places

    def _entry(self, key: str, entry: Record, places: dict[Any, Record]) -> SavedEntry:
        if "chunks" not in entry.fields:
            place = places.get((key, None))
            return SavedEntry(shape=None, chunks=(self._chunk(key, (), (), place),))
        boxes = [(tuple(box.fields["offsets"]), tuple(box.fields["sizes"])) for box in entry.fields["chunks"]]
        return SavedEntry(
            shape=tuple(entry.fields["size"]),
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
