"""The hashes of a checkpoint's files: the writer records them, the reader compares them."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

from .faults import CheckpointError

CHUNK_BYTES = 256 * 2**10
"""Fewest bytes per hash. Ranks divide a file by chunks, and a rank verifies little more than the bytes that it loads."""

HASH_DIGITS = 16


_WINDOW_BYTES = 16 * 2**20
"""How far ahead of the hashing the system reads."""


Progress = Callable[[int, int], None]
"""Called with the number of bytes done and the total number of bytes."""


Chunk = tuple[str, int]
"""A file's name, and the index of a chunk of the file."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file's size in bytes, the bytes per chunk, and the XXH3 64-bit hashes, in hexadecimal, of its consecutive chunks."""

    size: int
    chunk_bytes: int
    xxh3: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """Counts the chunks. An empty file has one, so a missing empty file is found, too."""
        return max(1, -(-self.size // self.chunk_bytes))

    def bytes_of(self, index: int) -> int:
        """Returns the number of bytes of a chunk."""
        return min(self.chunk_bytes, self.size - index * self.chunk_bytes)


def unhashed(size: int, most_chunks: int | None = None) -> FileRecord:
    """Returns the record of a file before its chunks are hashed.

    Args:
        most_chunks: limit of the number of chunks; None for chunks of `CHUNK_BYTES`.
    """
    return FileRecord(
        size=size, chunk_bytes=CHUNK_BYTES * max(1, -(-size // (CHUNK_BYTES * most_chunks)) if most_chunks else 1)
    )


def record_of(path: Path) -> FileRecord:
    """Hashes a whole file, in chunks of `CHUNK_BYTES`."""
    record = unhashed(path.stat().st_size)
    return replace(record, xxh3=tuple(hashes_of(path, range(record.chunks), record.chunk_bytes).values()))


def untold(_done_bytes: int, _total_bytes: int) -> None:
    """Ignores the progress."""


def hashes_of(
    path: Path, indices: Iterable[int], chunk_bytes: int, on_read: Callable[[int], None] = lambda _: None
) -> dict[int, str]:
    """Hashes these chunks of a file in ascending order: index → XXH3 64-bit hash, in hexadecimal.

    Args:
        on_read: called with the number of bytes of each read.
    """
    hashes = {}
    # Reuse one buffer: fresh memory for each chunk costs more time than hashing it.
    buffer = memoryview(bytearray(min(chunk_bytes, _READ_BYTES)))
    with path.open("rb", buffering=0) as file:
        for run in _runs(sorted(indices)):
            at = fetched = file.seek(run.start * chunk_bytes)
            for index in run:
                hashed, end = xxhash.xxh3_64(), (index + 1) * chunk_bytes
                while at < end:
                    if at >= fetched:
                        _fetch(file, at, min(_WINDOW_BYTES, run.stop * chunk_bytes - at))
                        fetched = at + _WINDOW_BYTES
                    filled = file.readinto(buffer[: end - at])
                    if not filled:
                        break
                    hashed.update(buffer[:filled])
                    at += filled
                    on_read(filled)
                hashes[index] = hashed.hexdigest()
    return hashes


_READ_BYTES = 2**20
"""Small enough to stay in a processor's cache until they are hashed."""


class Written(NamedTuple):
    """A run of bytes of a file, and the XXH3 64-bit hash of the bytes in memory. `name`: the tensor's, for errors."""

    path: Path
    offset: int
    nbytes: int
    xxh3: str
    name: str


def refuse_changed(written: Iterable[Written]) -> None:
    """Raises `CheckpointError` if a file's bytes differ from the bytes in memory."""
    for path, parts in groupby(sorted(written), key=attrgetter("path")):
        with path.open("rb", buffering=0) as file:
            for part in parts:
                hashed, left = xxhash.xxh3_64(), part.nbytes
                file.seek(part.offset)
                while left and (content := file.read(min(left, _READ_BYTES))):
                    hashed.update(content)
                    left -= len(content)
                if hashed.hexdigest() != part.xxh3:
                    raise CheckpointError(
                        f"{part.name!r} in {path.name} differs from its values in memory: the host's memory or disk is faulty"
                    )


def _runs(indices: Sequence[int]) -> Iterator[range]:
    """Yields the runs of consecutive indices."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield range(numbers[0], numbers[-1] + 1)


def _fetch(file: IO[bytes], begin: int, nbytes: int) -> None:
    """Asks the system to start reading exactly these bytes into its cache."""
    refuse_read_ahead(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, nbytes, os.POSIX_FADV_WILLNEED)


def refuse_read_ahead(file: IO[bytes]) -> None:
    """Turns off the system's read-ahead, which would read other ranks' chunks."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def share_of(records: Mapping[str, FileRecord], rank: int, world_size: int) -> list[Chunk]:
    """Returns the chunks of these files for one of `world_size` ranks to hash. All ranks get about equally many bytes."""
    total, before, own = max(1, sum(record.size for record in records.values())), 0, []
    for name, record in sorted(records.items()):
        for index in range(record.chunks):
            nbytes = record.bytes_of(index)
            # `min`: an empty file after all others would belong to rank `world_size`, which does not exist.
            if min(world_size - 1, (before + nbytes // 2) * world_size // total) == rank:
                own.append((name, index))
            before += nbytes
    return own


def by_file(chunks: Iterable[Chunk]) -> dict[str, list[int]]:
    """Groups chunks by file: name → indices."""
    indices: dict[str, list[int]] = {}
    for name, index in chunks:
        indices.setdefault(name, []).append(index)
    return indices
