"""Reads files of `torch.save` of unknown origin."""

import io
import os
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZipFile, is_zipfile

import torch


class _BoundedReads(io.BufferedReader):
    """A file whose reads never allocate more than its remaining bytes. A pickle of nine bytes may ask for 4 GiB."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def load_tensors(path: Path) -> Any:
    """Loads a file of `torch.save` with tensors and plain values only. Memory-maps the tensors if the format allows mapping.

    Raises:
        Exception: of any class, if the file is damaged or contains objects of other classes.
    """
    if is_zipfile(path):
        refuse_sizes(path)
        # torch does not notice damage in a mapped file, so `is_zipfile` has looked for the archive's end first.
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    with _BoundedReads(io.FileIO(path)) as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def refuse_sizes(archive: Path | IO[bytes]) -> None:
    """Raises `ValueError` if the entries are larger than the archive. torch allocates the sizes that the directory states."""
    with ZipFile(archive) as opened:
        stated = sum(entry.file_size for entry in opened.infolist())
        file = cast(IO[bytes], opened.fp)
        # torch's own archives are not compressed, and two entries never share bytes.
        if stated > file.seek(0, os.SEEK_END):
            raise ValueError(f"the directory of the archive states {stated} bytes, but the archive has {file.tell()}")
