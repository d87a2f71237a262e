"""One folder of torch.distributed.checkpoint: tensors by their path in the saved dictionary, read chunk by chunk."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..format.files import is_inside
from ..format.manifest import CheckpointError
from .chunks import Chunk, ChunkedFolder, SavedEntry
from .pickles import Record, load_dcp_metadata, load_stream

_VERSIONS = (None, "1.0.0")


class DcpFolder(ChunkedFolder):
    """One folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: not finished, damaged, or written with settings that are not covered.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        metadata = load_dcp_metadata(folder / ".metadata").fields
        if metadata.get("version") not in _VERSIONS:
            raise CheckpointError(
                f"hf_zero: {folder} has DCP version {metadata['version']!r}, and {_VERSIONS[-1]} is known. Continue it with FSDP."
            )
        paths = metadata.get("planner_data") or {}
        places = self._places(metadata.get("storage_data") or {})
        self._ends: dict[str, int] = {}
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
        return chunk.load()

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

    def _chunk(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Record | None) -> Chunk:
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
        start, length = fields["offset"], fields["length"]
        self._ends[file] = max(self._ends.get(file, 0), start + length)
        return Chunk(offsets=offsets, sizes=sizes, file=file, load=partial(self._load, file, start, length))

    def _refuse_short_files(self) -> None:
        for file, end in self._ends.items():
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(
                    f"hf_zero: {path} is missing. Each rank writes its own file: copy all of them into one folder."
                )
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"hf_zero: {path} is cut off: it has {path.stat().st_size} of {end} bytes. Resume from another checkpoint."
                )

    def _load(self, name: str, start: int, length: int) -> Any:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(length)
        except OSError as error:
            raise CheckpointError(
                f"hf_zero: {path} cannot be read ({error}). Resume from another checkpoint."
            ) from error
        return load_stream(content, path)


def _dtype_of(entry: Record) -> torch.dtype | None:
    properties = entry.fields.get("properties")
    if not isinstance(properties, Record):
        return None
    values = (*properties.unnamed, *properties.fields.values())
    return next((value for value in values if isinstance(value, torch.dtype)), None)
