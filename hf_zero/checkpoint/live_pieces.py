"""Safetensors files filled by several ranks: one rank writes the header, then each rank its own bytes."""

import json
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import xxhash

from ..allocation import allocate
from ..device import in_units
from ..layout.dealing import aligned
from .faults import CheckpointError
from .hashes import Written
from .staging import BUFFERS, HostCopy, Staging, Values

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
            f"{name} has dtype {dtype}, which cannot be saved; allowed: {', '.join(DTYPE_NAMES.values())}. Keep it in one of "
            "these, or register it with persistent=False"
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
                        f"{self.path} accepts no more data at byte {at}: {in_units(len(left))} are not written yet"
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
        f"{name!r} was edited while a save was writing it, before the next optimizer step. Edit it before the save, or set "
        "`checkpoint.async_save: false`"
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
