"""The hashes of a checkpoint's files: the writer records them, the reader compares them."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

from .faults import CheckpointError
from .files import is_inside

CHUNK_BYTES = 256 * 2**10
"""Bytes per hash. Ranks divide a file by chunks, and a rank verifies little more than the bytes that it loads."""

HASH_DIGITS = 16


_WINDOW_CHUNKS = 64


Progress = Callable[[int, int], None]
"""Called with the number of bytes done and the total number of bytes."""


Chunk = tuple[str, int]
"""A file's name, and the index of a run of `CHUNK_BYTES` in the file."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file's size in bytes, and the XXH3 64-bit hashes, in hexadecimal, of its consecutive 256 KiB chunks."""

    size: int
    xxh3: tuple[str, ...]


def chunks_in(size: int) -> int:
    """The number of chunks of a file of `size` bytes. An empty file has one chunk, so a missing empty file is found, too."""
    return max(1, -(-size // CHUNK_BYTES))


def untold(_done_bytes: int, _total_bytes: int) -> None:
    """Ignores the progress."""


def hashes_of(path: Path, indices: Iterable[int], on_read: Callable[[int], None] = lambda _: None) -> dict[int, str]:
    """Hashes these chunks of a file in ascending order: index → XXH3 64-bit hash, in hexadecimal.

    Args:
        on_read: called with the bytes of each chunk.
    """
    hashes = {}
    # Reuse one buffer: fresh memory for each chunk costs more time than hashing it.
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        for first, last in _windows(sorted(indices)):
            _fetch(file, first * CHUNK_BYTES, (last - first) * CHUNK_BYTES)
            file.seek(first * CHUNK_BYTES)
            for index in range(first, last):
                filled = 0
                # Read in a loop, because one unbuffered read may return only some of the requested bytes.
                while read := file.readinto(buffer[filled:]):
                    filled += read
                hashes[index] = xxhash.xxh3_64_hexdigest(buffer[:filled])
                on_read(filled)
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
                        f"{part.name!r} in {path.name} is not as it was in memory: the host's memory or its disk is broken"
                    )


def _windows(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields runs of consecutive indices, each at most `_WINDOW_CHUNKS` long, as (first, last + 1)."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        for first in range(numbers[0], numbers[-1] + 1, _WINDOW_CHUNKS):
            yield first, min(first + _WINDOW_CHUNKS, numbers[-1] + 1)


def _fetch(file: IO[bytes], begin: int, nbytes: int) -> None:
    """Asks the system to start reading exactly these bytes into its cache."""
    refuse_read_ahead(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, nbytes, os.POSIX_FADV_WILLNEED)


def refuse_read_ahead(file: IO[bytes]) -> None:
    """Turns off the system's read-ahead, which would read other ranks' chunks."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def share_of(sizes: Mapping[str, int], rank: int, world_size: int) -> list[Chunk]:
    """Returns the chunks of these files for one of `world_size` ranks to verify. All ranks get about equally many bytes."""
    total, before, own = max(1, sum(sizes.values())), 0, []
    for name in sorted(sizes):
        for index in range(chunks_in(sizes[name])):
            nbytes = min(CHUNK_BYTES, sizes[name] - index * CHUNK_BYTES)
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


def faults_of(
    folder: Path, records: Mapping[str, FileRecord], chunks: Sequence[Chunk], on_progress: Progress = untold
) -> list[tuple[str, str]]:
    """Lists (name, fault in words) for these chunks of recorded files: missing files, wrong sizes, changed content."""
    total = sum(min(CHUNK_BYTES, records[name].size - index * CHUNK_BYTES) for name, index in chunks)
    done = 0

    def on_read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(min(done, total), total)

    return [
        (name, fault)
        for name, indices in by_file(chunks).items()
        for fault in _faults_of_file(folder, name, records[name], indices, on_read)
    ]


def _faults_of_file(
    folder: Path, name: str, record: FileRecord, indices: Sequence[int], on_read: Callable[[int], None]
) -> list[str]:
    path = folder / name
    # Check in order of cost, and the name first: with `..` in a name, any file of the user's would be read.
    if not is_inside(name):
        return [f"the manifest names {name!r}, which is not inside the folder"]
    if not path.is_file():
        return [f"{name} is missing"]
    if path.stat().st_size != record.size:
        return [f"{name} has {path.stat().st_size} bytes instead of {record.size}"]
    try:
        bad = [index for index, found in hashes_of(path, indices, on_read).items() if found != record.xxh3[index]]
    except OSError as error:
        return [f"{name} cannot be read ({error})"]
    if not bad:
        return []
    at = bad[0] * CHUNK_BYTES
    return [
        f"{name} has other contents than were written ({len(bad)} damaged pieces of {CHUNK_BYTES} bytes, the first at {at})"
    ]
