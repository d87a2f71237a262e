"""Writes tensors to safetensors files, while training waits or continues: each rank writes its rows of masters and state."""

import importlib.metadata
import json
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from ..comm.all_or_none import Exchange, Merge
from ..device import allocate, in_units, pinned
from ..layout.boxes import Box
from ..layout.dealing import aligned
from ..layout.intervals import Cuts, EvenCuts, Interval, joined_cuts, joined_intervals, without_ranks
from ..queues import Mark, queue_end, side_queue
from ..versions import __version__
from .commit import merged_on_all_ranks, on_all_ranks
from .files import SAVE_KEY, CheckpointError, Written
from .manifest import MANIFEST_NAME, WEIGHTS, Manifest, SavedRows, row_file

# ---- Copies from an accelerator to files, through two pinned buffers in turn ----

BUFFERS = 2
"""One buffer is written to the file while the other is filled."""


class Values(Protocol):
    """A 1-D tensor, or an object which computes one slice by slice."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def numel(self) -> int: ...
    def __getitem__(self, part: slice) -> "Values": ...
    def detach(self) -> torch.Tensor:
        """Returns the tensor."""


class HostCopy:
    """Values in host memory, used without a copy."""

    def __init__(self, values: Values):
        self._values = values

    def values(self) -> Values:
        """Returns the values, which stay valid until `release`."""
        return self._values

    def release(self) -> None:
        """Ends the use of the values."""


class Staging:
    """Copies values from accelerators to host memory, a few at a time. Values in host memory are used without a copy.

    The caller must not write to the values before `HostCopy.values` has returned.

    Args:
        values: all values that will be copied, which set the size of the buffers.
    """

    def __init__(self, values: Iterable[Values]):
        most_bytes: dict[torch.device, int] = {}
        for each in values:
            if each.device.type != "cpu":
                most_bytes[each.device] = max(each.nbytes, most_bytes.get(each.device, 0))
        self._ways = {device: _Way(device, nbytes) for device, nbytes in most_bytes.items()}

    def start(self, values: Values) -> HostCopy:
        """Starts to copy values to host memory. At most `BUFFERS` copies may be unreleased at a time."""
        way = self._ways.get(values.device)
        return HostCopy(values) if way is None else way.start(values)

    def close(self) -> None:
        """Frees the buffers. All copies must have been released."""
        for way in self._ways.values():
            way.close()


class _Way:
    """Copies from one accelerator through pinned buffers. `nbytes`: the size of each buffer."""

    def __init__(self, device: torch.device, nbytes: int):
        self._device = device
        self._nbytes = nbytes
        self._queue = side_queue(device)
        self._since = queue_end(device)
        self._free: list[torch.Tensor] = []
        self._buffers = 0

    def start(self, values: Values) -> HostCopy:
        buffer = self._take()
        # On a side stream, after the work queued on the device when the save began: the copy sees the values of the save, and
        # training continues in parallel.
        with self._queue.aside(behind=self._since):
            source = values.detach()
            target = buffer[: source.nbytes].view(source.dtype)
            target.copy_(source, non_blocking=True)
        return _StagedCopy(target, source, self._queue.mark(), buffer, self._free)

    def close(self) -> None:
        self._free.clear()
        self._buffers = 0

    def _take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        if self._buffers == BUFFERS:
            raise AssertionError(
                f"hf_zero: bug: more than {BUFFERS} copies of a save are under way. Open an issue with this traceback."
            )
        self._buffers += 1
        return pinned(self._nbytes, self._device)


class _StagedCopy(HostCopy):
    """A copy in a pinned buffer.

    Args:
        copied: marks the end of the copy.
        free: the list that gets the buffer back on release.
    """

    def __init__(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        copied: Mark,
        buffer: torch.Tensor,
        free: list[torch.Tensor],
    ):
        super().__init__(target)
        # Keep the source until the copy has ended: otherwise the allocator reuses the memory, and another tensor's values are
        # saved.
        self._source: torch.Tensor | None = source
        self._copied = copied
        self._buffer = buffer
        self._free = free

    def values(self) -> Values:
        if self._source is not None:
            # Wait for this copy's event only. Waiting for the stream would include the other buffer's copy.
            self._copied.wait()
            self._source = None
        return super().values()

    def release(self) -> None:
        # An unread copy may still be writing to the buffer. Wait, so that the next user gets the buffer afterwards.
        self.values()
        self._free.append(self._buffer)


# ---- safetensors files filled by several ranks: one rank writes the header, then each rank its own bytes ----

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""dtype → its name in the safetensors format."""

_ALIGNMENT_BYTES = 8
_CHUNK_BYTES = 16 * 2**20
_GLANCE_S = 0.001


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Returns safetensors' name of a dtype. Raises `CheckpointError` for a dtype without one; `name`: the tensor's, for the
    error."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{name} has dtype {dtype}, which cannot be saved; those that can are {', '.join(DTYPE_NAMES.values())}. Keep it "
            "in one of them, or register it with persistent=False"
        )
    return DTYPE_NAMES[dtype]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of bytes of one file: `values`, 1-D and contiguous, are written at byte `offset` of `path`.

    Attributes:
        name: the tensor's, for errors.
    """

    path: Path
    offset: int
    values: Values
    name: str = ""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def in_memory(self) -> Written:
        """Hashes the values, which must be in host memory."""
        return self._hashed(self._content())

    def _content(self) -> memoryview:
        return memoryview(self.values.detach().view(torch.uint8).numpy())

    def _hashed(self, content: memoryview) -> Written:
        return Written(self.path, self.offset, len(content), xxhash.xxh3_64_hexdigest(content), self.name)

    def write(self) -> Written:
        """Writes the values, which must be in host memory, at `offset`; returns their hash from before the write.

        Raises:
            OSError: from the disk.
            CheckpointError: the disk writes fewer bytes than it was given.
        """
        content = self._content()
        # Hash memory, before the write: a hash of the file would also match bytes changed on the way to the disk.
        hashed = self._hashed(content)
        # Without O_CREAT: `lay_out` has made the file, so if the file is missing, somebody removed the folder.
        handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            left, at = content, self.offset
            while left:
                written = os.pwrite(handle, left, at)
                if written == 0:
                    raise CheckpointError(
                        f"{self.path} takes no more at byte {at}: {in_units(len(left))} are left to write"
                    )
                left, at = left[written:], at + written
        finally:
            os.close(handle)
        return hashed


def lay_out(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Makes a safetensors file with a header for these tensors and no values yet; returns each tensor's first byte.

    Args:
        tensors: name → dtype and shape.
        metadata: the header's `__metadata__`.

    Raises:
        OSError: no room, or no permission to write there.
        CheckpointError: a dtype has no name in the format.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begins = {}
    end = 0
    # Wide dtypes first: each tensor then starts at a multiple of its element size.
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        begins[name] = begin
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad with spaces, which JSON allows after a value, to align the first tensor as well.
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    start = len(text) + 8
    # Remove a link instead of following it. Mode "x" fails if somebody makes one in between.
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        # Allocate the whole file now: a full disk fails here, before training has waited for any value, and each rank can
        # then write its part without waiting for another.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, start + end)
        else:
            # macOS: a full disk fails only when the bytes are written.
            file.truncate(start + end)
    return {name: start + begin for name, begin in begins.items()}


def write_all(pieces: Iterable[Piece], on_written: Callable[[int], None] = lambda _: None) -> list[Written]:
    """Writes pieces one after the other. `on_written`: called with the bytes of each part after its write."""
    # Split into chunks: an object which computes its tensor then never holds the whole tensor.
    chunks = [chunk for piece in pieces for chunk in _chunks(piece)]
    staging = Staging(chunk.values for chunk in chunks)
    try:
        return _write_staged(chunks, staging, on_written)
    finally:
        staging.close()


def _write_staged(chunks: Iterable[Piece], staging: Staging, on_written: Callable[[int], None]) -> list[Written]:
    written = []
    for chunk in _in_host_memory(chunks, staging):
        written.append(chunk.write())
        on_written(chunk.nbytes)
    return written


def _in_host_memory(pieces: Iterable[Piece], staging: Staging) -> Generator[Piece, None, None]:
    """Yields the pieces with their values in host memory, and copies the next one while the caller writes."""
    left, coming = iter(pieces), deque[tuple[Piece, HostCopy]]()
    try:
        while True:
            coming.extend((piece, staging.start(piece.values)) for piece in islice(left, BUFFERS - len(coming)))
            if not coming:
                return
            piece, copy = coming[0]
            yield replace(piece, values=copy.values())
            coming.popleft()[1].release()
    finally:
        # Release also after an error: otherwise the next round would lack a buffer.
        for _, copy in coming:
            copy.release()


_SMALL_BYTES = 64 * 2**10
"""For so few bytes, a copy takes about as long as its launch."""

_SAMPLED_BYTES = 1024
"""A sample reads one element per so many bytes: one cache line of sixteen."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size → integer dtype. Samples sum bits, so a NaN counts like any other value."""


class _Samples:
    """Sums one element of each run of `_SAMPLED_BYTES` in a tensor, to detect writes to the tensor.

    A write to at least twice as many consecutive bytes changes the sum, and so does a write to many elements. Summing all
    elements would make training wait about five times as long.
    """

    def __init__(self) -> None:
        self._positions: dict[tuple[torch.device, int], torch.Tensor] = {}

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of a chunk's samples: an int64 scalar on the values' device, equal on every kind of device."""
        run = _SAMPLED_BYTES // values.itemsize
        key = values.device, values.itemsize
        if key not in self._positions:
            runs = torch.arange(_CHUNK_BYTES // _SAMPLED_BYTES + 1, device=values.device)
            # Sample at a different offset in each run: with a fixed one, a write to a column of a matrix could miss every sample.
            self._positions[key] = runs * run + (runs * 2654435761 >> 16) % run
        bits = values.detach().view(_BITS[values.itemsize])
        return bits.index_select(0, self._positions[key][: values.numel() // run]).sum(dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class _Chunk(Piece):
    """A part of a piece. `number`: its index among the sampled chunks; -1 without a sample."""

    number: int = -1


class LivePieces:
    """Pieces written by one thread while another is about to change their values.

    The values are written from their own memory, small ones from a copy that is made at once. Call `secure` before the values
    change: it copies the pieces that are not written yet.

    Args:
        most_bytes: limit for the copies. `secure` writes the pieces that do not fit itself.
        refuse_edits: raises if values have been changed without `secure`. Called when all is written or copied.

    Attributes:
        nbytes: bytes of all pieces.
        written_bytes: bytes of the pieces that are written.
        on_written: called with the bytes of each part, in the thread that has written it.
        written: the parts that are written, with the hashes of their values in memory.
    """

    def __init__(self, pieces: Iterable[Piece], most_bytes: int, refuse_edits: Callable[[], None]):
        self._samples = _Samples()
        sums: list[torch.Tensor] = []
        self._left = deque(self._begun(chunk, sums) for piece in pieces for chunk in _chunks(piece))
        # Stack the sums into one tensor per device: reading them then costs one wait.
        devices = dict.fromkeys(each.device for each in sums)
        numbers = {device: [n for n, each in enumerate(sums) if each.device == device] for device in devices}
        self._sums_at_save = [(found, torch.stack([sums[n] for n in found])) for found in numbers.values()]
        self._sums_written: dict[int, tuple[str, torch.Tensor]] = {}
        # Make the staging after the sums: its copies then wait for the sums, which are queued on the device now.
        self._staging = Staging([*(chunk.values for chunk in self._left), *(each for _, each in self._sums_at_save)])
        self._ready = _in_host_memory(tuple(self._left), self._staging)
        self.nbytes = sum(chunk.nbytes for chunk in self._left)
        self.written_bytes = 0
        self.written: list[Written] = []
        self._copied: dict[tuple[Path, int], Written] = {}
        self.on_written: Callable[[int], None] = lambda _: None
        self._most_bytes = most_bytes
        self._refuse_edits = refuse_edits
        self._is_secured = False
        self._lock = threading.Lock()
        self._is_wanted = False
        self._fault: Exception | None = None

    def write(self) -> None:
        """Writes all pieces. Raises the errors of `Piece.write`, also the ones from `secure`."""
        while True:
            # Python's locks are not fair: without this wait, a thread in `secure` would wait until all pieces are written.
            while self._is_wanted:
                time.sleep(_GLANCE_S)
            with self._lock:
                if self._fault is not None:
                    self._end_copies()
                    raise self._fault
                if not self._left:
                    try:
                        self._refuse_changed()
                    finally:
                        self._end_copies()
                    # Uses the tensors' version counters: a step without `secure` has mixed two steps in one file.
                    if not self._is_secured:
                        self._refuse_edits()
                        self._is_secured = True
                    return
                try:
                    if self._is_secured and not self._copied:
                        # Hash all copies now, as some may wait long for a slow disk. `secure` does not hash: training waits for
                        # it.
                        self._copied = {(copy.path, copy.offset): copy.in_memory() for copy in self._left}
                    chunk = next(self._ready)
                    self._write(chunk)
                    # Remove the chunk after the write: `secure`, in the other thread, treats the chunks in `_left` as unwritten.
                    self._left.popleft()
                    self._count(chunk.nbytes)
                except Exception:
                    # Leave nothing for `secure`: training must not wait for copies of a failed save.
                    self._left.clear()
                    self._end_copies()
                    raise

    def drop(self) -> None:
        """Makes `write` raise in its thread before the next piece."""
        self._fault = CheckpointError("the save was interrupted")

    def secure(self) -> None:
        """Copies or writes the remaining pieces. Their values may change afterwards."""
        if self._is_secured:
            return
        self._is_wanted = True
        try:
            with self._lock:
                # Check again under the lock: the writing thread may have finished while this one waited.
                if self._is_secured:
                    return
                self._is_secured = True
                # The pieces of unfinished copies are still in `_left`, and are copied again below.
                self._ready.close()
                now, copies = _snapshot(list(self._left), self._most_bytes, self._staging)
                # Copy only the remaining pieces: if the disk finishes before the next optimizer step, nothing is copied.
                self._left = deque(copies)
                for chunk in _in_host_memory(now, self._staging):
                    self._write(chunk)
                    self._count(chunk.nbytes)
                self._end_copies()
                self._ready = _in_host_memory(tuple(copies), self._staging)
                self._refuse_edits()
        except Exception as fault:
            # This is the training thread; the saving thread raises the fault in `write` and informs all ranks.
            self._fault = fault
            self._end_copies()
        finally:
            self._is_wanted = False

    def _begun(self, chunk: Piece, sums: list[torch.Tensor]) -> Piece:
        """Returns a chunk to write later: a copy of a small one, or a large one itself, with its sample added to `sums`."""
        if not isinstance(chunk.values, torch.Tensor):
            # The values are computed when they are read, from state the script cannot access.
            return chunk
        if is_small(chunk.nbytes):
            return replace(chunk, values=chunk.values.detach().clone())
        sums.append(self._samples.of(chunk.values))
        return _Chunk(**vars(chunk), number=len(sums) - 1)

    def _write(self, chunk: Piece) -> None:
        hashed = chunk.write()
        self.written.append(self._copied.get((chunk.path, chunk.offset), hashed))
        if isinstance(chunk, _Chunk):
            # Sample after the write, to detect a change during the write.
            self._sums_written[chunk.number] = (chunk.name, self._samples.of(chunk.values.detach()))

    def _refuse_changed(self) -> None:
        """Raises if written values differ from the values at the save. Version counters miss writes through `.data` and numpy."""
        for numbers, sums in self._sums_at_save:
            copy = self._staging.start(sums)
            at_save = copy.values().detach().tolist()
            copy.release()
            for number, expected in zip(numbers, at_save):
                name, found = self._sums_written[number]
                if found.item() != expected:
                    raise edited_while_written(name)

    def _end_copies(self) -> None:
        self._ready.close()
        self._staging.close()

    def _count(self, nbytes: int) -> None:
        self.written_bytes += nbytes
        self.on_written(nbytes)


def is_small(nbytes: int) -> bool:
    """Whether `LivePieces` copies a chunk of this size at once."""
    return nbytes <= _SMALL_BYTES


def edited_while_written(name: str) -> CheckpointError:
    """Makes the error for a tensor changed before its save was written."""
    return CheckpointError(
        f"{name!r} was edited between a save and the next optimizer step, while it was being written. Edit it before "
        "the save, or set `checkpoint.async_save: false`"
    )


def _chunks(piece: Piece) -> Iterable[Piece]:
    numel = max(1, _CHUNK_BYTES // piece.values.itemsize)
    flat = piece.values.detach().reshape(-1) if torch.is_tensor(piece.values) else piece.values
    for start in range(0, flat.numel(), numel):
        yield replace(piece, offset=piece.offset + start * flat.itemsize, values=flat[start : start + numel])


def _snapshot(pieces: Sequence[Piece], most_bytes: int, staging: Staging) -> tuple[list[Piece], list[Piece]]:
    """Returns the pieces beyond `most_bytes`, and copies in host memory of the others."""
    fitting, used = 0, 0
    for piece in pieces:
        if used + piece.nbytes > most_bytes:
            break
        fitting, used = fitting + 1, used + aligned(piece.nbytes, _ALIGNMENT_BYTES)
    # Allocate all copies at once: training waits here, and many small allocations would each touch new pages.
    arena = allocate(used, torch.uint8, torch.device("cpu"))
    copies, at = [], 0
    for piece in _in_host_memory(pieces[:fitting], staging):
        # Start each copy at a multiple of eight bytes: torch only views bytes as a wider dtype from a multiple of its size.
        values = arena[at : at + piece.nbytes].view(piece.values.dtype)
        values.copy_(piece.values.detach())
        copies.append(replace(piece, values=values))
        at += aligned(piece.nbytes, _ALIGNMENT_BYTES)
    return list(pieces[fitting:]), copies


# ---- A rank's rows of masters and optimizer state, in one file per rank ----

Row = tuple[str, str, Interval, Values]
"""Kind of state, parameter name, interval of the parameter's elements, and the 1-D tensor of those elements."""

_LIBRARIES = ("torch", "transformers", "accelerate", "safetensors")

_THEN = (
    "The checkpoint is not complete and will not be resumed from; training state is unharmed. Free space or make the folder "
    "writable."
)


@dataclass(frozen=True, kw_only=True)
class RowsOfRanks:
    """Describes the rows of some ranks, in as few `EvenCuts` as their shards allow.

    The ranks merge these in rounds until each has the rows of all ranks. Shards have equal sizes, so neither a message nor its
    parsing grows with the number of ranks times the number of buckets.

    Attributes:
        ranks: intervals of the ranks in this.
        shapes: parameter name → whole shape.
        scalars: parameter name → state that is one value for all elements.
        own_shapes: parameter name → kind → shape, of state tensors of another shape than the parameter's.
        rows: (parameter name, its kinds and their dtypes, box) → the cuts of its rows and their ranks.
    """

    ranks: tuple[Interval, ...]
    shapes: dict[str, tuple[int, ...]]
    scalars: dict[str, dict[str, Any]]
    own_shapes: dict[str, dict[str, tuple[int, ...]]]
    rows: "dict[tuple[str, tuple[tuple[str, str], ...], Box | None], list[Cuts]]"

    @classmethod
    def of_rank(
        cls,
        rank: int,
        rows: Iterable[Row],
        *,
        shapes: dict[str, tuple[int, ...]],
        scalars: dict[str, dict[str, Any]],
        own_shapes: dict[str, dict[str, tuple[int, ...]]],
        boxes: Mapping[str, Box],
    ) -> "RowsOfRanks":
        """Describes the rows of one rank. Arguments as of `plan_rows`."""
        # By interval: the kinds of a parameter's state are mostly cut at the same elements.
        parts: dict[tuple[str, Interval], list[tuple[str, str]]] = {}
        for kind, name, interval, tensor in rows:
            parts.setdefault((name, interval), []).append((kind, dtype_name(name, tensor.dtype)))
        found: dict[tuple[str, tuple[tuple[str, str], ...], Box | None], list[Cuts]] = {}
        for (name, (start, stop)), kinds in parts.items():
            cuts = EvenCuts(start, stop, 0, stop), range(rank, rank + 1)
            found.setdefault((name, tuple(kinds), boxes.get(name)), []).append(cuts)
        return cls(ranks=(Interval(rank, rank + 1),), shapes=shapes, scalars=scalars, own_shapes=own_shapes, rows=found)

    def merged(self, other: "RowsOfRanks") -> "RowsOfRanks":
        """Returns the rows of the ranks of both."""
        # In the last round of messages, both may have the rows of a rank.
        is_double = any(mine.intersect(theirs) for mine in self.ranks for theirs in other.ranks)
        rows = dict(self.rows)
        for key, added in other.rows.items():
            if is_double:
                added = [part for each in added for part in without_ranks(*each, self.ranks)]
            rows[key] = joined_cuts([*rows[key], *added]) if key in rows else added
        return RowsOfRanks(
            ranks=tuple(joined_intervals([*self.ranks, *other.ranks])),
            shapes=self.shapes | other.shapes,
            scalars=self.scalars | _of_either(self.scalars, other.scalars),
            own_shapes=self.own_shapes | _of_either(self.own_shapes, other.own_shapes),
            rows=rows,
        )

    def manifest(self, world_size: int, stage: int, optimizers: Sequence[dict[str, Any]]) -> Manifest:
        """Returns the manifest of these rows, in an order that does not depend on the order of merges."""
        kinds: dict[str, dict[str, None]] = {}
        rows: list[SavedRows] = []
        index = {name: number for number, name in enumerate(self.shapes)}

        def place(key: Any) -> tuple[int, str]:
            return index.get(key[0], len(index)), repr(key)

        for name, of_part, box in sorted(self.rows, key=place):
            kinds.setdefault(name, {}).update((kind, None) for kind, _ in of_part if kind != WEIGHTS)
            for cuts, ranks in self.rows[name, of_part, box]:
                rows.extend(
                    SavedRows(kind=kind, name=name, cuts=cuts, ranks=ranks, dtype=dtype, box=box)
                    for kind, dtype in of_part
                )
        return Manifest(
            world_size=world_size,
            stage=stage,
            shapes=self.shapes,
            kinds={name: tuple(found) for name, found in kinds.items() if found},
            rows=tuple(rows),
            scalars=dict(sorted(self.scalars.items(), key=place)),
            optimizers=tuple(optimizers),
            own_shapes=dict(sorted(self.own_shapes.items(), key=place)),
            versions=dict(versions_of(*_LIBRARIES)),
        )


def _of_either(mine: Mapping[str, dict], theirs: Mapping[str, dict]) -> dict[str, dict]:
    """Returns the values of both; of two different ones the same one on all ranks, whose manifests must be equal."""
    return {
        name: value if name not in mine or mine[name] == value else min(mine[name], value, key=repr)
        for name, value in theirs.items()
    }


def plan_rows(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    stage: int,
    save: str,
    rows: Sequence[Row],
    shapes: dict[str, tuple[int, ...]],
    scalars: dict[str, dict[str, Any]],
    optimizers: Callable[[], Sequence[dict[str, Any]]],
    merge: Merge,
    own_shapes: dict[str, dict[str, tuple[int, ...]]] | None = None,
    boxes: Mapping[str, Box] | None = None,
) -> tuple[Manifest, list[Piece]]:
    """Makes this rank's file; returns the manifest of all ranks' rows, and this rank's pieces. Collective.

    Args:
        save: ID of the save, the same on every rank.
        shapes, scalars: for the parameters of this rank's rows.
        optimizers: returns JSON values, the same on every rank; raises if an optimizer cannot be saved.
        merge: merges the values of all ranks.
        own_shapes: name → kind → shape, for this rank's state tensors whose shape differs from the parameter's.
        boxes: name → the box of the parameter whose elements this rank's intervals count, if it is not the whole parameter.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed. There is no manifest then.
    """
    file = row_file(rank, world_size)

    def lay_out_own() -> RowsOfRanks:
        # Called here: if an optimizer cannot be saved, all ranks raise together.
        described.extend(optimizers())
        folder.mkdir(parents=True, exist_ok=True)
        # Remove the older manifest, which must not vouch for the new files.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        # Allocate the full size before values are copied: a full disk then fails before any training state is touched.
        begins = lay_out(
            folder / file,
            {f"{kind}/{name}": (tensor.dtype, tensor.shape) for kind, name, _, tensor in rows},
            # Also in the file: a manifest on another disk has no checksum of this file, which a person may copy there.
            {SAVE_KEY: save},
        )
        pieces.extend(
            Piece(
                path=folder / file,
                offset=begins[f"{kind}/{name}"],
                values=tensor,
                name=name if kind == WEIGHTS else f"{kind} of {name}",
            )
            for kind, name, _, tensor in rows
        )
        return RowsOfRanks.of_rank(
            rank, rows, shapes=shapes, scalars=_plain(scalars), own_shapes=own_shapes or {}, boxes=boxes or {}
        )

    pieces: list[Piece] = []
    described: list[dict[str, Any]] = []
    rows_of_all = merged_on_all_ranks(merge, rank, lay_out_own, doing=f"write to {folder}", then=_THEN)
    return replace(rows_of_all.manifest(world_size, stage, described), save=save), pieces


def write_pieces(
    pieces: Sequence[Piece],
    folder: Path,
    exchange: Exchange,
    manifest: Manifest,
    on_written: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Writes this rank's pieces; returns the manifest to seal, with the hashes of the pieces in memory. Collective.

    Args:
        on_written: called with the bytes of each part after it is written.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed.
    """
    written: list[Written] = []

    def write() -> None:
        written.extend(write_all(pieces, on_written))

    on_all_ranks(exchange, write, doing=f"write to {folder}", then=_THEN)
    return replace(manifest, written=tuple(written))


def write_live(pieces: LivePieces, folder: Path, exchange: Exchange, manifest: Manifest) -> Manifest:
    """Writes pieces whose values are about to change; returns the manifest as `write_pieces` does. Collective."""
    on_all_ranks(exchange, pieces.write, doing=f"write to {folder}", then=_THEN)
    return replace(manifest, written=tuple(pieces.written))


@cache
def versions_of(*libraries: str) -> Mapping[str, str]:
    """Returns the versions of the package and of libraries. Cached, since the lookup takes 20 ms of every save.

    The package's own version is not looked up: a checkout on PYTHONPATH is not installed, and its first save would fail.
    """
    return {"hf-zero": __version__} | {library: importlib.metadata.version(library) for library in libraries}


def _plain(scalars: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Formats 0-d tensors as {"dtype", "value"}; keeps numbers, strings, booleans and None."""
    plain: dict[str, dict[str, Any]] = {}
    numbers = _numbers_of(value for values in scalars.values() for value in values.values())
    for name, values in scalars.items():
        plain[name] = {}
        for key, value in values.items():
            if torch.is_tensor(value) and not value.is_complex():
                if value.numel() != 1:
                    raise CheckpointError(
                        f"hf_zero: the optimizer keeps {key!r} of {name!r} with {value.numel()} elements, neither "
                        "one nor one an element of this rank's part, so it cannot be saved. Set `stage: 0`, where a "
                        "rank has whole parameters."
                    )
                value = {"dtype": str(value.dtype).removeprefix("torch."), "value": numbers[id(value)]}
            elif not isinstance(value, int | float | str | None):
                raise CheckpointError(
                    f"hf_zero: the optimizer keeps {key!r} of {name!r} as a {_kind_of(value)}, and only tensors, numbers "
                    "and strings can be saved. Use another optimizer, or train without checkpoints."
                )
            plain[name][key] = value
    return plain


def _kind_of(value: Any) -> str:
    return f"number of {value.dtype}" if torch.is_tensor(value) else type(value).__name__


def _numbers_of(values: Iterable[Any]) -> dict[int, int | float | bool]:
    """Reads tensors of one element: id → number. Waits for an accelerator once per dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for value in values:
        if torch.is_tensor(value) and value.numel() == 1 and not value.is_complex():
            alike.setdefault((value.device, value.dtype), []).append(value)
    numbers: dict[int, int | float | bool] = {}
    for found in alike.values():
        # Copy all with one wait: `item()` for each would make the host wait once per parameter.
        together = torch.stack([value.detach().reshape(()) for value in found]).tolist()
        # Key by id: `scalars` keeps these tensors alive until the numbers are looked up, so ids are unique.
        numbers.update(zip(map(id, found), together))
    return numbers
