"""The files of a checkpoint: what is recorded of each when it is written, and what is found wrong when it is read."""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import xxhash

CHUNK_BYTES = 32 * 2**20
"""What is hashed in one piece: several ranks can share a large file."""
_LARGEST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


Chunk = tuple[str, int]
"""A file's name, and which of its runs of `CHUNK_BYTES` is meant."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file's size in bytes, and the XXH3 64-bit hash, in hexadecimal, of each 32 MiB of it in turn."""

    size: int
    xxh3: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        size = path.stat().st_size
        return cls(size=size, xxh3=tuple(hash_of(path, index) for index in range(chunks_in(size))))


def chunks_in(size: int) -> int:
    """How many chunks a file of `size` bytes has: one for an empty file, so that it is looked at too."""
    return max(1, -(-size // CHUNK_BYTES))


def hash_of(path: Path, index: int) -> str:
    """The XXH3 64-bit hash of one chunk, in hexadecimal."""
    with path.open("rb") as file:
        file.seek(index * CHUNK_BYTES)
        return xxhash.xxh3_64_hexdigest(file.read(CHUNK_BYTES))


def share_of(sizes: Mapping[str, int], rank: int, world_size: int) -> list[Chunk]:
    """The chunks of these files that one of `world_size` ranks looks at; all have about as many bytes."""
    total, before, own = max(1, sum(sizes.values())), 0, []
    for name in sorted(sizes):
        for index in range(chunks_in(sizes[name])):
            nbytes = min(CHUNK_BYTES, sizes[name] - index * CHUNK_BYTES)
            if min(world_size - 1, (before + nbytes // 2) * world_size // total) == rank:
                own.append((name, index))
            before += nbytes
    return own


def files_below(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it, with forward slashes, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_inside(name: str) -> bool:
    """Whether a recorded name stays inside its folder: relative, and without `..`."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def faults_of(folder: Path, records: Mapping[str, FileRecord], chunks: Iterable[Chunk]) -> list[str]:
    """What is wrong with these chunks of recorded files, in words: absent, of another size, of other contents."""
    faults = []
    for name, index in chunks:
        path, record = folder / name, records[name]
        if not is_inside(name):
            faults.append(f"the manifest names {name!r}, which is not inside the folder")
        elif not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != record.size:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {record.size}")
        else:
            try:
                if hash_of(path, index) != record.xxh3[index]:
                    faults.append(f"{name} has other contents than were written (checksum {record.xxh3[index]})")
            except OSError as error:
                faults.append(f"{name} cannot be read ({error})")
    return faults


def is_whole_safetensors(path: Path) -> bool:
    """Whether a file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(_LARGEST_HEADER_BYTES, size - 8):
            return False
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return size == 8 + header_bytes + max(ends, default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return False


def sync(path: Path) -> None:
    """Has the system put a file, or a folder's list of names, on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
