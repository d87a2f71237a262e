"""Reads files of a folder that nobody vouches for: links, JSON, safetensors headers, and the errors that say what is wrong."""

import errno
import json
import math
import os
import pickle
import re
import shutil
import stat
import struct
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import xxhash

from ..config.checks import SpeltError, spelt

# ---- The error of everything that reads or writes checkpoints ----


class CheckpointError(SpeltError, ValueError):
    """Says why a checkpoint cannot be read or written: names the folder or file, the fault and the remedy."""


# ---- Text out of files that somebody else may have written, made fit to be shown ----


def shown(text: object, most: int = 200) -> str:
    """Returns a value as one line of at most `most` characters. Control and unprintable characters are spelt out."""
    line = spelt(str(text)[: most + 1]).replace("\n", "\\n")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def in_one_line(error: BaseException) -> str:
    """Returns an error's class, and the first line of its text."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_LONGEST_REASON = 300


def reason(error: Exception | None) -> str:
    """Returns an error's first line, with the next if the first only announces it; its class without a text."""
    said = []
    for line in str(error).strip().splitlines():
        said.append(line.strip())
        # transformers' configs name a field and a colon first, and what is wrong with its value below.
        if not said[-1].endswith(":"):
            break
    return (" ".join(said) or type(error).__name__)[:_LONGEST_REASON].rstrip(".")


_BY_DAMAGE = (EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError, struct.error, zipfile.BadZipFile)
"""What readers of pickles and archives raise for bytes that are not what was written. A pickle may raise any of these."""

_SAYS_DAMAGE = re.compile(
    r"PytorchStreamReader|archive is corrupted|unexpected EOF|magic number|wrong byte size|unexpected pos"
)
"""In a RuntimeError of torch, which raises that class for anything."""

_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")
_SAID_BY_UNPICKLER = re.compile(r"WeightsUnpickler error:\s*(.*)")
_SAYS_CLASS = re.compile(r"add_safe_globals|must be imported")
"""In an error of the unpickler that misses a class."""


def read_fault(error: Exception) -> str:
    """Says in words, after a file's name, why it cannot be read. Only an error of damaged bytes is called damage."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        return f"needs {shown(refused[1])}, which is not loaded: a checkpoint may hold tensors and plain values only"
    said = _SAID_BY_UNPICKLER.search(text)
    cause = f"{type(error).__name__}: {said[1]}" if said is not None else in_one_line(error)
    if isinstance(error, pickle.UnpicklingError):
        is_damage = _SAYS_CLASS.search(cause) is None
    elif isinstance(error, OSError):
        # torch asks for bytes before the beginning of an archive that is cut off.
        is_damage = error.errno == errno.EINVAL
    elif isinstance(error, RuntimeError):
        is_damage = _SAYS_DAMAGE.search(text) is not None
    else:
        # By its name: this floor does not import safetensors.
        is_damage = isinstance(error, _BY_DAMAGE) or type(error).__name__ == "SafetensorError"
    return f"{'is cut off or damaged' if is_damage else 'cannot be read'} ({shown(cause)})"


# ---- Links that lead out of a folder: files behind them belong to somebody else and are neither read nor copied ----


def leads_out(root: Path, path: Path) -> bool:
    """Whether `path`, somewhere below `root`, resolves to a file or folder outside.

    A snapshot in the Hub's cache is made of links to the `blobs` folder beside it, which is a part of it.
    """
    here, real = os.path.realpath(root), os.path.realpath(path)
    # With the separator: `/runs/model-2` begins with `/runs/model`, and is outside.
    if real == here or real.startswith(here + os.sep):
        return False
    snapshots = Path(here).parent
    return snapshots.name != "snapshots" or Path(real).parent != snapshots.parent / "blobs"


def entry_faults(root: Path) -> list[str]:
    """Lists in words the entries below `root` that are never read: links to outside, pipes, devices."""
    walk = os.walk(root)
    paths = sorted(Path(folder, name) for folder, folders, files in walk for name in (*folders, *files))
    links = [path for path in paths if path.is_symlink() and leads_out(root, path)]
    # A pipe would be waited for, and a device has no end. A link to nowhere leads out or is no file to anybody.
    odd = [path for path in paths if path.exists() and not path.is_file() and not path.is_dir()]
    return [
        *(f"{path.relative_to(root).as_posix()} is a link that leads out of the folder" for path in links),
        *(f"{path.relative_to(root).as_posix()} is no plain file" for path in odd),
    ]


def refuse_links(root: Path, paths: Iterable[Path]) -> None:
    """Raises `CheckpointError` if one of these paths leads out of `root`."""
    for path in paths:
        if leads_out(root, path):
            raise CheckpointError(
                f"hf_zero: {path} leads out of {root} (to {os.path.realpath(path)}), and nothing outside of the folder is read "
                "or copied. Put the file itself there, or take the link away."
            )


# ---- Files in folders that others may write to: no link is followed, and a name never has half a file ----

MARK = ".hf_zero-"
"""Begins the names of files that exist for a moment. A killed run may leave some, and the next run removes them."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Puts a file of this content at `path` with one rename. A link there is replaced and not followed."""
    # Others cannot guess the name, so they cannot put a link there; mode "x" would refuse the link.
    temporary = path.with_name(f"{MARK}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # The rename may reach the disk before the content. After a power cut, the name would belong to an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # By the name that the reader of the error knows.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def copy_new(source: Path, target: Path) -> None:
    """Copies a file's content, permissions and times. Raises `FileExistsError` if something is at `target`, a link included."""
    with source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        found = os.fstat(read.fileno())
        os.fchmod(written.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(written.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))


def open_in_place(path: Path, flags: int) -> int:
    """Opens a file that is changed in place, and makes one if there is none.

    Raises:
        CheckpointError: it is a link, a file with several names, or no plain file.
    """
    refusal = f"{path} is a link or no plain file, and not hf_zero's. Take it away"
    # O_NONBLOCK: opening a pipe would wait for its other end.
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(refusal) from error
        raise
    # The flags refuse no hard link, which may be another file of this user, and they open a pipe. `fstat` and not `stat`: the
    # file at the path may have been exchanged since.
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise CheckpointError(refusal)
    return file


# ---- JSON files that somebody else may have written: read with a limit on their size, and with one kind of error ----

LARGEST_BYTES = 256 * 2**20
"""Far above any config, index, trainer state or card data."""


def read_text(path: Path, *, most_bytes: int = LARGEST_BYTES) -> str:
    """Reads a UTF-8 file. Raises `CheckpointError` for an unreadable file and for one larger than `most_bytes`."""
    try:
        # The size first: a folder from the Hub may hold a file that fills the memory of the host.
        nbytes = path.stat().st_size
        if nbytes > most_bytes:
            raise CheckpointError(f"hf_zero: {path} has {nbytes} bytes, and at most {most_bytes} are read.")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"hf_zero: {path} cannot be read ({error}).") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"hf_zero: {path} is damaged: it is no text ({error.reason}).") from error


def parse_json(text: str, path: Path) -> Any:
    """Parses a file's text. Raises `CheckpointError` for invalid JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"hf_zero: {path} is damaged: its values are nested too deeply.") from error
    except ValueError as error:
        # Also a number of more digits than Python converts.
        raise CheckpointError(f"hf_zero: {path} is damaged ({error}).") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping. Raises `CheckpointError` otherwise."""
    content = parse_json(read_text(path), path)
    if not isinstance(content, dict):
        raise CheckpointError(f"hf_zero: {path} holds a {type(content).__name__}, where a mapping is due.")
    return content


_MOST_COUNTED = 2**63
"""More than torch can count."""


def is_size(value: object) -> bool:
    """Whether a JSON value is a number of elements or bytes that torch can count."""
    return type(value) is int and 0 <= value < _MOST_COUNTED


def is_shape(value: object) -> bool:
    """Whether a JSON value is a list of sizes with a product that torch can count."""
    if not isinstance(value, list) or not all(is_size(size) for size in value):
        return False
    # Zeros aside: torch multiplies what is there besides.
    return math.prod(size for size in value if size) < _MOST_COUNTED


# ---- Headers of safetensors files, each checked before anything relies on one ----

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes an element, by dtype as the format spells it; of others, the file's word is taken."""

_LARGEST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


@dataclass(frozen=True)
class TensorSpan:
    """The bytes of a tensor in a safetensors file, from `begin` up to `end`; dtype as safetensors spells it ("F32")."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str


def is_whole_safetensors(path: Path) -> bool:
    """Whether a file is as long as the header says."""
    header = _header_of(path)
    if header is None:
        return False
    header_bytes, spans, _ = header
    return path.stat().st_size == max([header_bytes, *(span.end for span in spans.values())])


def tensors_in(path: Path) -> dict[str, tuple[int, int]]:
    """Each tensor of a safetensors file: its first byte, and bytes an element. {} for a file that is cut off."""
    spans = spans_in(path) or {}
    numels = {name: math.prod(span.shape) for name, span in spans.items()}
    # Tensors without elements have no bytes to share out, and would divide by zero.
    return {name: (span.begin, (span.end - span.begin) // numels[name]) for name, span in spans.items() if numels[name]}


def spans_in(path: Path) -> dict[str, TensorSpan] | None:
    """Tensor → its bytes in a safetensors file; None for a file of another kind."""
    header = _header_of(path) if path.is_file() else None
    return None if header is None else header[1]


SAVE_KEY = "save"
"""Under which the header of a rank's file has the ID of its save."""


def save_in(path: Path) -> str:
    """Returns the ID of the save in a safetensors file's header; "" without one, and for a file of another kind."""
    header = _header_of(path) if path.is_file() else None
    metadata = {} if header is None else header[2]
    save = metadata.get(SAVE_KEY, "") if isinstance(metadata, dict) else ""
    return save if isinstance(save, str) else ""


def _header_of(path: Path) -> tuple[int, dict[str, TensorSpan], Any] | None:
    """Reads a header: bytes up to the first tensor, the tensors, and the metadata; None for a file of another kind."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        refuse_read_ahead(file)
        prefix = file.read(8)
        if len(prefix) < 8:
            return None
        (header_bytes,) = struct.unpack("<Q", prefix)
        # Unchecked, eight bytes of a damaged file could ask for exabytes of memory.
        if header_bytes > min(_LARGEST_HEADER_BYTES, size - 8):
            return None
        try:
            entries = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError):
            return None
    if not isinstance(entries, dict):
        return None
    start = 8 + header_bytes
    spans = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            span = _span_of(entry, start)
            if span is None:
                return None
            spans[name] = span
    return start, spans, entries.get("__metadata__")


def _span_of(entry: Any, start: int) -> TensorSpan | None:
    """Reads a tensor's entry; None where dtype, shape and bytes contradict each other."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not is_shape(shape) or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    if not all(is_size(offset) for offset in offsets) or offsets[1] < offsets[0]:
        return None
    # Trusted bytes beyond the shape would let one tensor read another's.
    if dtype in DTYPE_BYTES and offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        return None
    return TensorSpan(start + offsets[0], start + offsets[1], tuple(shape), dtype)


# ---- The files of a checkpoint: recorded when they are written, checked when they are read ----

CHUNK_BYTES = 256 * 2**10
"""Bytes hashed in one piece. Ranks share a file by pieces, and a rank checks little more than the bytes that it loads."""
HASH_DIGITS = 16
_LONGEST_PATH = 1024
_LONGEST_PART = 255
"""Of a name between two slashes, in bytes: what file systems take."""
_WINDOW_CHUNKS = 64

Progress = Callable[[int, int], None]
"""Is called with the bytes that are done and the bytes in all."""

Chunk = tuple[str, int]
"""A file's name, and which of its runs of `CHUNK_BYTES` is meant."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file's size in bytes, and the XXH3 64-bit hash, in hexadecimal, of each 256 KiB in turn."""

    size: int
    xxh3: tuple[str, ...]


def no_folder(path: Path) -> str:
    """Says in words why `path` is not a folder."""
    return f"{path} is a file; give the folder that it is in" if path.exists() else f"there is no folder {path}"


def chunks_in(size: int) -> int:
    """Counts the chunks of a file of `size` bytes; an empty file has one, so that it is checked too."""
    return max(1, -(-size // CHUNK_BYTES))


def untold(_done_bytes: int, _total_bytes: int) -> None:
    """Reports progress to nobody."""


def hashes_of(path: Path, indices: Iterable[int], on_read: Callable[[int], None] = lambda _: None) -> dict[int, str]:
    """Hashes these chunks of a file in order: index → XXH3 64-bit hash, in hexadecimal.

    Args:
        on_read: is told the bytes of each chunk.
    """
    hashes = {}
    # One buffer for all: fresh memory for each chunk costs more than hashing it.
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        for first, last in _windows(sorted(indices)):
            _fetch(file, first * CHUNK_BYTES, (last - first) * CHUNK_BYTES)
            file.seek(first * CHUNK_BYTES)
            for index in range(first, last):
                filled = 0
                # In a loop: without a buffer of Python's, one read may return fewer bytes than there are.
                while read := file.readinto(buffer[filled:]):
                    filled += read
                hashes[index] = xxhash.xxh3_64_hexdigest(buffer[:filled])
                on_read(filled)
    return hashes


_READ_BYTES = 2**20
"""Few enough to stay in a processor's cache until they are hashed."""


class Written(NamedTuple):
    """A run of bytes of a file, and the XXH3 64-bit hash that they had in memory. `name`: of the tensor, for errors."""

    path: Path
    offset: int
    nbytes: int
    xxh3: str
    name: str


def refuse_changed(written: Iterable[Written]) -> None:
    """Raises `CheckpointError` if a file does not have the bytes that were in memory."""
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
    """Runs of consecutive numbers, none above `_WINDOW_CHUNKS` long, as (first, last + 1)."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        for first in range(numbers[0], numbers[-1] + 1, _WINDOW_CHUNKS):
            yield first, min(first + _WINDOW_CHUNKS, numbers[-1] + 1)


def _fetch(file: IO[bytes], begin: int, nbytes: int) -> None:
    """Asks the system to begin reading exactly these bytes."""
    refuse_read_ahead(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, nbytes, os.POSIX_FADV_WILLNEED)


def refuse_read_ahead(file: IO[bytes]) -> None:
    """Turns the system's read-ahead off: it would read chunks that another rank checks."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def share_of(sizes: Mapping[str, int], rank: int, world_size: int) -> list[Chunk]:
    """Returns the chunks of these files that one of `world_size` ranks checks. All ranks get about as many bytes."""
    total, before, own = max(1, sum(sizes.values())), 0, []
    for name in sorted(sizes):
        for index in range(chunks_in(sizes[name])):
            nbytes = min(CHUNK_BYTES, sizes[name] - index * CHUNK_BYTES)
            # `min`: an empty file behind all others would fall to a rank that does not exist, and nobody would check that file.
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


def files_below(folder: Path) -> list[str]:
    """Lists all files below a folder, relative, with forward slashes, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_inside(name: str) -> bool:
    """Whether a recorded name stays inside its folder: relative, without `..`, printable, and not too long."""
    path = PurePosixPath(name)
    return (
        0 < len(name) <= _LONGEST_PATH
        and name.isprintable()
        and "\\" not in name
        and not path.is_absolute()
        and ".." not in path.parts
        and all(len(part.encode()) <= _LONGEST_PART for part in path.parts)
    )


def faults_of(
    folder: Path, records: Mapping[str, FileRecord], chunks: Sequence[Chunk], on_progress: Progress = untold
) -> list[tuple[str, str]]:
    """Lists names and, in words, faults of these chunks of recorded files: absent, of another size, of other contents."""
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
    # From cheap to dear, and the name first: a name with `..` would have this read any file of the user's.
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


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
