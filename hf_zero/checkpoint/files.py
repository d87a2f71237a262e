"""Reads files from untrusted folders: links, JSON, safetensors headers and hashes, with errors for each fault."""

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

# ---- The error of all code for checkpoints ----


class CheckpointError(SpeltError, ValueError):
    """A checkpoint cannot be read or written. The message names the folder or file, the fault and the remedy."""


# ---- Untrusted text from files, escaped before it is shown ----


def shown(text: object, most: int = 200) -> str:
    """Returns a value as one line of at most `most` characters. Control and unprintable characters are escaped."""
    line = spelt(str(text)[: most + 1]).replace("\n", "\\n")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def in_one_line(error: BaseException) -> str:
    """Returns an error's class and the first line of its text."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_LONGEST_REASON = 300


def reason(error: Exception | None) -> str:
    """Returns an error's first line, joined with the next if the first ends with a colon; the error's class if the text is
    empty."""
    said = []
    for line in str(error).strip().splitlines():
        said.append(line.strip())
        # transformers' config errors name a field and a colon first, and the fault on the next line.
        if not said[-1].endswith(":"):
            break
    return (" ".join(said) or type(error).__name__)[:_LONGEST_REASON].rstrip(".")


_BY_DAMAGE = (EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError, struct.error, zipfile.BadZipFile)
"""Raised by readers of pickles and archives on damaged bytes. A damaged pickle may raise any of these."""

_SAYS_DAMAGE = re.compile(
    r"PytorchStreamReader|archive is corrupted|unexpected EOF|magic number|wrong byte size|unexpected pos"
)
"""Marks damage in a RuntimeError of torch, which uses that class for many other faults."""

_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")
_SAID_BY_UNPICKLER = re.compile(r"WeightsUnpickler error:\s*(.*)")
_SAYS_CLASS = re.compile(r"add_safe_globals|must be imported")
"""Marks an error of the unpickler about a class that it does not know."""


def read_fault(error: Exception) -> str:
    """Explains why a file cannot be read, as words to follow its name. Only damaged bytes are called damage."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        return f"needs {shown(refused[1])}, which is not loaded: a checkpoint may hold tensors and plain values only"
    said = _SAID_BY_UNPICKLER.search(text)
    cause = f"{type(error).__name__}: {said[1]}" if said is not None else in_one_line(error)
    if isinstance(error, pickle.UnpicklingError):
        is_damage = _SAYS_CLASS.search(cause) is None
    elif isinstance(error, OSError):
        # torch seeks before the beginning of an archive that is cut off.
        is_damage = error.errno == errno.EINVAL
    elif isinstance(error, RuntimeError):
        is_damage = _SAYS_DAMAGE.search(text) is not None
    else:
        # Compare the class by name: this module does not import safetensors.
        is_damage = isinstance(error, _BY_DAMAGE) or type(error).__name__ == "SafetensorError"
    return f"{'is cut off or damaged' if is_damage else 'cannot be read'} ({shown(cause)})"


# ---- Links out of a folder: their targets belong to somebody else, so a link is neither read nor copied ----


def leads_out(root: Path, path: Path) -> bool:
    """Whether `path`, somewhere below `root`, resolves to a file or folder outside of `root`.

    A snapshot in the Hub's cache consists of links to the `blobs` folder of its repository, which counts as inside.
    """
    here, real = os.path.realpath(root), os.path.realpath(path)
    # Compare with the separator: `/runs/model-2` starts with `/runs/model` and is outside.
    if real == here or real.startswith(here + os.sep):
        return False
    snapshots = Path(here).parent
    return snapshots.name != "snapshots" or Path(real).parent != snapshots.parent / "blobs"


def entry_faults(root: Path) -> list[str]:
    """Describes the entries below `root` which are never read: links to outside, pipes, devices."""
    walk = os.walk(root)
    paths = sorted(Path(folder, name) for folder, folders, files in walk for name in (*folders, *files))
    links = [path for path in paths if path.is_symlink() and leads_out(root, path)]
    # Reading a pipe would wait, and a device has no end. A dangling link leads out, or exists for no reader.
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


# ---- Files in folders with other writers: links are not followed, and no name ever belongs to a partial file ----

MARK = ".hf_zero-"
"""Prefix of the names of short-lived files. A killed run may leave some; the next run removes them."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes `content` to a temporary file and renames the file to `path`. A link at `path` is replaced, not followed."""
    # Others cannot guess the temporary name and put a link there. Mode "x" would refuse a link anyway.
    temporary = path.with_name(f"{MARK}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # The rename may reach the disk before the content: after a power cut, the name would belong to an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # Name the final path, which the reader of the error knows.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def copy_new(source: Path, target: Path) -> None:
    """Copies a file's content, permissions and times. Raises `FileExistsError` if `target` exists, even as a link."""
    with source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        found = os.fstat(read.fileno())
        os.fchmod(written.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(written.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))


def open_in_place(path: Path, flags: int) -> int:
    """Opens a file for changes in place, or makes one. Returns the handle.

    Raises:
        CheckpointError: it is a link, a file with several names (hard links), or no plain file.
    """
    refusal = f"{path} is a link or no plain file, and not hf_zero's. Take it away"
    # O_NONBLOCK: opening a pipe would otherwise wait for its other end.
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(refusal) from error
        raise
    # The flags accept a hard link, which may be another file of this user, and a pipe. Use `fstat`, as the file at the path may
    # have been replaced since.
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise CheckpointError(refusal)
    return file


# ---- JSON files of unknown origin: their size is limited, and all faults raise one kind of error ----

LARGEST_BYTES = 256 * 2**20
"""Far larger than any config, index, trainer state or card data."""


def read_text(path: Path, *, most_bytes: int = LARGEST_BYTES) -> str:
    """Reads a UTF-8 file. Raises `CheckpointError` if the file is unreadable or larger than `most_bytes`."""
    try:
        # Check the size first: a folder from the Hub may contain a file large enough to fill the host's memory.
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
        # Python also raises this for an integer with too many digits.
        raise CheckpointError(f"hf_zero: {path} is damaged ({error}).") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file with a mapping. Raises `CheckpointError` for any other content."""
    content = parse_json(read_text(path), path)
    if not isinstance(content, dict):
        raise CheckpointError(f"hf_zero: {path} holds a {type(content).__name__}, where a mapping is due.")
    return content


_MOST_COUNTED = 2**63
"""Larger than any size that torch supports."""


def is_size(value: object) -> bool:
    """Whether a JSON value is a number of elements or bytes within torch's limits."""
    return type(value) is int and 0 <= value < _MOST_COUNTED


def is_shape(value: object) -> bool:
    """Whether a JSON value is a list of sizes whose product torch can count."""
    if not isinstance(value, list) or not all(is_size(size) for size in value):
        return False
    # Leave out zeros: torch also multiplies the remaining sizes.
    return math.prod(size for size in value if size) < _MOST_COUNTED


# ---- Headers of safetensors files, each checked before its values are used ----

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
"""Bytes per element, by the format's name of the dtype. For unlisted dtypes the file's offsets are trusted."""

_LARGEST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


@dataclass(frozen=True)
class TensorSpan:
    """The byte range [begin, end) of a tensor in a safetensors file. `dtype` is the format's name ("F32")."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str


def is_whole_safetensors(path: Path) -> bool:
    """Whether a file's length is the one its header implies."""
    header = _header_of(path)
    if header is None:
        return False
    header_bytes, spans, _ = header
    return path.stat().st_size == max([header_bytes, *(span.end for span in spans.values())])


def tensors_in(path: Path) -> dict[str, tuple[int, int]]:
    """Tensor → its first byte and its bytes per element. {} for a file with an unreadable header."""
    spans = spans_in(path) or {}
    numels = {name: math.prod(span.shape) for name, span in spans.items()}
    # Skip tensors without elements: the division would be by zero.
    return {name: (span.begin, (span.end - span.begin) // numels[name]) for name, span in spans.items() if numels[name]}


def spans_in(path: Path) -> dict[str, TensorSpan] | None:
    """Tensor → its byte range in a safetensors file; None if the file is missing or of another kind."""
    header = _header_of(path) if path.is_file() else None
    return None if header is None else header[1]


SAVE_KEY = "save"
"""Metadata key of the save's ID in the header of a rank's file."""


def save_in(path: Path) -> str:
    """Returns the ID of the save from a safetensors file's header; "" without one, or for a file of another kind."""
    header = _header_of(path) if path.is_file() else None
    metadata = {} if header is None else header[2]
    save = metadata.get(SAVE_KEY, "") if isinstance(metadata, dict) else ""
    return save if isinstance(save, str) else ""


def _header_of(path: Path) -> tuple[int, dict[str, TensorSpan], Any] | None:
    """Reads a header: the offset of the first tensor, the tensors, and the metadata; None for a file of another kind."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        refuse_read_ahead(file)
        prefix = file.read(8)
        if len(prefix) < 8:
            return None
        (header_bytes,) = struct.unpack("<Q", prefix)
        # Check the length: in a damaged file, these eight bytes could ask for exabytes of memory.
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
    """Reads a tensor's header entry; None if its dtype, shape and bytes contradict each other."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not is_shape(shape) or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    if not all(is_size(offset) for offset in offsets) or offsets[1] < offsets[0]:
        return None
    # If a range beyond the shape were trusted, one tensor could contain another's bytes.
    if dtype in DTYPE_BYTES and offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        return None
    return TensorSpan(start + offsets[0], start + offsets[1], tuple(shape), dtype)


# ---- The files of a checkpoint: the writer records hashes, the reader compares them ----

CHUNK_BYTES = 256 * 2**10
"""Bytes per hash. Ranks divide a file by chunks, and a rank verifies little more than the bytes that it loads."""
HASH_DIGITS = 16
_LONGEST_PATH = 1024
_LONGEST_PART = 255
"""Limit of file systems for one name between two slashes, in bytes."""
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


def no_folder(path: Path) -> str:
    """Explains why `path` is not a folder."""
    return f"{path} is a file; give the folder that it is in" if path.exists() else f"there is no folder {path}"


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
                # Loop: an unbuffered read may return fewer bytes than the file has left.
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


def files_below(folder: Path) -> list[str]:
    """Lists all files below a folder as relative paths with forward slashes, sorted."""
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


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
