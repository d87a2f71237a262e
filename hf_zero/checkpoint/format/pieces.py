"""safetensors files that several ranks fill at once: the header first, then each rank its own bytes in their place.

The file has its full length from the start, so the disk's room for it is taken before the first byte is written, and no
rank waits for another.
"""

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

from ...device import allocate, in_units
from .manifest import CheckpointError
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
"""dtypes as the safetensors format spells them."""

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_ALIGNMENT_BYTES = 8
_CHUNK_BYTES = 16 * 2**20
_GLANCE_S = 0.001


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """How the safetensors format spells the dtype of a tensor `name`. Raises `CheckpointError` where it has no name for it."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{name} has dtype {dtype}, which cannot be saved; those that can are {', '.join(DTYPE_NAMES.values())}. Keep it "
            "in one of them, or register it with persistent=False"
        )
    return DTYPE_NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that the safetensors format spells so. Raises `CheckpointError` for one that torch does not have."""
    if name not in _DTYPES:
        raise CheckpointError(f"hf_zero: dtype {name} of a safetensors file is none of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of bytes of one file: `values`, 1-D and contiguous, belong at byte `offset` of `path`."""

    path: Path
    offset: int
    values: Values

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def write(self) -> None:
        """Puts the values, which are in host memory, in their place.

        Raises:
            OSError, CheckpointError: the latter when the disk takes fewer bytes.
        """
        if not self.nbytes:
            return
        # A file that exists: made by `lay_out`, whichever rank did that.
        handle = os.open(self.path, os.O_WRONLY)
        try:
            left = memoryview(self.values.detach().view(torch.uint8).numpy())
            at = self.offset
            while left:
                written = os.pwrite(handle, left, at)
                if written == 0:
                    raise CheckpointError(
                        f"{self.path} takes no more at byte {at}: {in_units(len(left))} are left to write"
                    )
                left, at = left[written:], at + written
        finally:
            os.close(handle)


def lay_out(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Makes a safetensors file of these tensors with nothing in it yet; returns the byte at which each begins.

    Args:
        tensors: name → dtype and shape.
        metadata: what the header says beside them.

    Raises:
        OSError: no room, or no right to write there.
        CheckpointError: a dtype that the format has no name for.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begins = {}
    end = 0
    # Wide ones first, so that each begins at a multiple of its element.
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        begins[name] = begin
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    start = len(text) + 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, start + end)
        else:
            # macOS: a full disk shows when the bytes are written.
            file.truncate(start + end)
    return {name: start + begin for name, begin in begins.items()}


def write_all(pieces: Iterable[Piece], on_written: Callable[[int], None] = lambda _: None) -> None:
    """Writes pieces one after the other.

    Args:
        on_written: is told the bytes of each part that has been written.
    """
    # What is no tensor yet never is all at once.
    chunks = [chunk for piece in pieces for chunk in _chunks(piece)]
    staging = Staging(chunk.values for chunk in chunks)
    try:
        _write_staged(chunks, staging, on_written)
    finally:
        staging.close()


def _write_staged(chunks: Iterable[Piece], staging: Staging, on_written: Callable[[int], None]) -> None:
    for chunk in _in_host_memory(chunks, staging):
        chunk.write()
        on_written(chunk.nbytes)


def _in_host_memory(pieces: Iterable[Piece], staging: Staging) -> Generator[Piece, None, None]:
    """The pieces with their values in host memory, each until the next is asked for, which is on its way meanwhile."""
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
        for _, copy in coming:
            copy.release()


class LivePieces:
    """Pieces that one thread writes while another is about to change their values.

    The values are written from where they live. `secure`, called before they change, copies what is left by then: where the
    disk is done before the next optimizer step, nothing is ever copied.

    Args:
        most_bytes: that the copies may take; `secure` writes what does not fit itself.
        refuse_edits: raises if values have been changed without `secure`. Called when all is written or copied.

    Attributes:
        nbytes: of all pieces.
        written_bytes: of those that are written.
        on_written: is told the bytes of each part, in the thread that has written it.
    """

    def __init__(self, pieces: Iterable[Piece], most_bytes: int, refuse_edits: Callable[[], None]):
        self._left = deque(chunk for piece in pieces for chunk in _chunks(piece))
        self._staging = Staging(chunk.values for chunk in self._left)
        self._ready = _in_host_memory(tuple(self._left), self._staging)
        self.nbytes = sum(chunk.nbytes for chunk in self._left)
        self.written_bytes = 0
        self.on_written: Callable[[int], None] = lambda _: None
        self._most_bytes = most_bytes
        self._refuse_edits = refuse_edits
        self._is_secured = False
        self._lock = threading.Lock()
        self._is_wanted = False
        self._fault: Exception | None = None

    def write(self) -> None:
        """Writes them all; raises what `Piece.write` raises, in `secure` too."""
        while True:
            # Python's locks are not fair: without this, the one who waits in `secure` would wait for all.
            while self._is_wanted:
                time.sleep(_GLANCE_S)
            with self._lock:
                if self._fault is not None:
                    self._end_copies()
                    raise self._fault
                if not self._left:
                    self._end_copies()
                    if not self._is_secured:
                        self._refuse_edits()
                        self._is_secured = True
                    return
                try:
                    chunk = next(self._ready)
                    chunk.write()
                    self._left.popleft()
                    self._count(chunk.nbytes)
                except Exception:
                    self._left.clear()
                    self._end_copies()
                    raise

    def drop(self) -> None:
        """Has `write`, in its thread, raise in place of writing what is left."""
        self._fault = CheckpointError("the save was interrupted")

    def secure(self) -> None:
        """Returns once the values may change."""
        if self._is_secured:
            return
        self._is_wanted = True
        try:
            with self._lock:
                if self._is_secured:
                    return
                self._is_secured = True
                # What was on its way is asked for once more.
                self._ready.close()
                now, copies = _snapshot(list(self._left), self._most_bytes, self._staging)
                self._left = deque(copies)
                _write_staged(now, self._staging, self._count)
                self._end_copies()
                self._ready = _in_host_memory(tuple(copies), self._staging)
                self._refuse_edits()
        except Exception as fault:
            # This is the thread that trains; the one that saves tells all ranks.
            self._fault = fault
            self._end_copies()
        finally:
            self._is_wanted = False

    def _end_copies(self) -> None:
        self._ready.close()
        self._staging.close()

    def _count(self, nbytes: int) -> None:
        self.written_bytes += nbytes
        self.on_written(nbytes)


def _chunks(piece: Piece) -> Iterable[Piece]:
    numel = max(1, _CHUNK_BYTES // piece.values.itemsize)
    flat = piece.values.detach().reshape(-1) if torch.is_tensor(piece.values) else piece.values
    for start in range(0, flat.numel(), numel):
        yield replace(piece, offset=piece.offset + start * flat.itemsize, values=flat[start : start + numel])


def _snapshot(pieces: Sequence[Piece], most_bytes: int, staging: Staging) -> tuple[list[Piece], list[Piece]]:
    """The pieces that do not fit in `most_bytes`, and copies in host memory of the others."""
    fitting, used = 0, 0
    for piece in pieces:
        if used + piece.nbytes > most_bytes:
            break
        fitting, used = fitting + 1, used + _aligned(piece.nbytes)
    arena = allocate(used, torch.uint8, torch.device("cpu"))
    copies, at = [], 0
    for piece in _in_host_memory(pieces[:fitting], staging):
        values = arena[at : at + piece.nbytes].view(piece.values.dtype)
        values.copy_(piece.values.detach())
        copies.append(replace(piece, values=values))
        at += _aligned(piece.nbytes)
    return list(pieces[fitting:]), copies


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
