"""The files of a checkpoint: what is recorded of each when it is written, and what is found wrong when it is read."""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import xxhash

_CHUNK_BYTES = 8 * 2**20
_LARGEST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file's size in bytes, and the XXH3 64-bit hash of its contents in hexadecimal."""

    size: int
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        digest = xxhash.xxh3_64()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return cls(size=path.stat().st_size, xxh3=digest.hexdigest())


def files_below(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it, with forward slashes, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_inside(name: str) -> bool:
    """Whether a recorded name stays inside its folder: relative, and without `..`."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def faults_of(folder: Path, records: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """What is wrong with the recorded files `names`, in words: absent, of another size, of other contents."""
    faults = []
    for name in names:
        path, record = folder / name, records[name]
        if not is_inside(name):
            faults.append(f"the manifest names {name!r}, which is not inside the folder")
        elif not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != record.size:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {record.size}")
        else:
            try:
                if FileRecord.of(path) != record:
                    faults.append(f"{name} has other contents than were written (checksum {record.xxh3})")
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
