"""Writes and reads pieces of tensors in safetensors files."""

import json
import math
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from ..device import Mark, allocate, in_units, pinned, queue_end, side_queue
from ..layout.boxes import Box
from ..layout.slots import Interval
from .files import CheckpointError, is_whole_safetensors, spans_in

# ---- Tensors of an accelerator on their way into files, through two pinned buffers that take turns ----

BUFFERS = 2
"""One is written to the file while the other is filled."""


class Values(Protocol):
    """A 1-D tensor, or an object that makes one part by part."""

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
        """The tensor."""


class HostCopy:
    """Values that are in host memory already, so that no copy is made."""

    def __init__(self, values: Values):
        self._values = values

    def values(self) -> Values:
        """Returns the values, which stay until `release`."""
        return self._values

    def release(self) -> None:
        """Ends the use of the values."""


class Staging:
    """Copies values from accelerators to host memory, a few at a time. Values in host memory are used in place.

    Nobody may write to the values until `HostCopy.values` has returned.

    Args:
        values: all that are to be copied.
    """

    def __init__(self, values: Iterable[Values]):
        most_bytes: dict[torch.device, int] = {}
        for each in values:
            if each.device.type != "cpu":
                most_bytes[each.device] = max(each.nbytes, most_bytes.get(each.device, 0))
        self._ways = {device: _Way(device, nbytes) for device, nbytes in most_bytes.items()}

    def start(self, values: Values) -> HostCopy:
        """Begins to copy values to host memory. At most `BUFFERS` copies may be unreleased."""
        way = self._ways.get(values.device)
        return HostCopy(values) if way is None else way.start(values)

    def close(self) -> None:
        """Frees the buffers, all of which have been released."""
        for way in self._ways.values():
            way.close()


class _Way:
    """Copies from one accelerator through pinned buffers. `nbytes`: of each buffer."""

    def __init__(self, device: torch.device, nbytes: int):
        self._device = device
        self._nbytes = nbytes
        self._queue = side_queue(device)
        self._since = queue_end(device)
        self._free: list[torch.Tensor] = []
        self._buffers = 0

    def start(self, values: Values) -> HostCopy:
        buffer = self._take()
        # On a stream of its own, behind the work that the device had when the save began: it sees the values of that
        # time, and training goes on beside it.
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
        free: takes the buffer back.
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
        # Kept until the copy has ended: else the allocator gives the memory to another tensor, and its values are
        # saved.
        self._source: torch.Tensor | None = source
        self._copied = copied
        self._buffer = buffer
        self._free = free

    def values(self) -> Values:
        if self._source is not None:
            # The event of this copy alone. A wait for the stream would wait for the other buffer's copy too.
            self._copied.wait()
            self._source = None
        return super().values()

    def release(self) -> None:
        # A copy that nobody has asked for still writes to the buffer: the next user must not have it before.
        self.values()
        self._free.append(self._buffer)


# ---- safetensors files that several ranks fill at once: one writes the header, then each rank its own bytes ----

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
    """Spells the dtype of a tensor `name` as safetensors does. Raises `CheckpointError` for a dtype without a name there."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{name} has dtype {dtype}, which cannot be saved; those that can are {', '.join(DTYPE_NAMES.values())}. Keep it "
            "in one of them, or register it with persistent=False"
        )
    return DTYPE_NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype of a safetensors name. Raises `CheckpointError` for a dtype that torch does not have."""
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
        """Writes the values, which are in host memory, at `offset`.

        Raises:
            OSError, CheckpointError: the latter when the disk takes fewer bytes.
        """
        if not self.nbytes:
            return
        # Without O_CREAT: `lay_out` has made the file, and a missing one means that the folder was taken away.
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
    """Makes a safetensors file of these tensors without values; returns the byte at which each begins.

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
        # The whole file at once: a full disk shows here, before training has waited for a single value, and each rank
        # can then write its part without waiting for another.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, start + end)
        else:
            # macOS: a full disk shows when the bytes are written.
            file.truncate(start + end)
    return {name: start + begin for name, begin in begins.items()}


def write_all(pieces: Iterable[Piece], on_written: Callable[[int], None] = lambda _: None) -> None:
    """Writes pieces one after the other. `on_written`: is told the bytes of each part that has been written."""
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
    """Yields the pieces with their values in host memory, and copies the next one meanwhile."""
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
        # Also after an error: an unreleased buffer would be missing in the next round.
        for _, copy in coming:
            copy.release()


class LivePieces:
    """Pieces that one thread writes while another is about to change their values.

    The values are written from where they live; `secure`, called before they change, copies the rest.

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
        """Writes all pieces. An error of `Piece.write`, in `secure` too, is raised here."""
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
                    # Seen by the tensors' version counters: a step without `secure` has mixed two steps in one file.
                    if not self._is_secured:
                        self._refuse_edits()
                        self._is_secured = True
                    return
                try:
                    chunk = next(self._ready)
                    chunk.write()
                    # Behind the write: `secure`, in the other thread, takes pieces that are still here for unwritten.
                    self._left.popleft()
                    self._count(chunk.nbytes)
                except Exception:
                    self._left.clear()
                    self._end_copies()
                    raise

    def drop(self) -> None:
        """Makes `write`, in its thread, raise before the next piece."""
        self._fault = CheckpointError("the save was interrupted")

    def secure(self) -> None:
        """Copies or writes the remaining pieces; then their values may change."""
        if self._is_secured:
            return
        self._is_wanted = True
        try:
            with self._lock:
                if self._is_secured:
                    return
                self._is_secured = True
                # Copies under way are of pieces that are still in `_left`, and start again below.
                self._ready.close()
                now, copies = _snapshot(list(self._left), self._most_bytes, self._staging)
                # Only the pieces that are left: a disk that is done before the next optimizer step costs no copy at all.
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
    """Returns the pieces that do not fit in `most_bytes`, and copies in host memory of the others."""
    fitting, used = 0, 0
    for piece in pieces:
        if used + piece.nbytes > most_bytes:
            break
        fitting, used = fitting + 1, used + _aligned(piece.nbytes)
    # One allocation for all copies: training waits here, and many small ones would each touch new pages.
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


# ---- Tensors of a safetensors file in memory-mapped pages, none of which is read before somebody looks at it ----


def mapped_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Maps a safetensors file: name → tensor. Writes to a tensor stay in this process.

    Raises:
        CheckpointError: not a whole safetensors file.
        OSError: it cannot be read.
    """
    spans = spans_in(path)
    if spans is None or not is_whole_safetensors(path):
        raise CheckpointError(
            f"hf_zero: {path} cannot be read (its header is missing, or says another length); the checkpoint is damaged, "
            "resume from an earlier one."
        )
    with path.open("rb") as file:
        # safetensors' `get_tensor` touches a tensor's first page, and the system then reads its neighbours too: a rank
        # would read far more than its part.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    tensors = {}
    for name, span in spans.items():
        dtype = dtype_named(span.dtype)
        numel = (span.end - span.begin) // dtype.itemsize
        flat = (
            torch.frombuffer(pages, dtype=dtype, count=numel, offset=span.begin)
            if numel
            else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(span.shape)
    return tensors


# ---- Part of a tensor put together from blocks of it, as checkpoints of other layouts hold them ----

_Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class SavedBlock:
    """Elements of a tensor that lie beside each other along each dimension.

    Attributes:
        offsets, sizes: in the whole tensor, one a dimension.
        load: the values, of shape `sizes`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], torch.Tensor]


def read_blocks(box: Box, interval: Interval, blocks: Iterable[SavedBlock]) -> torch.Tensor:
    """Reads the elements `interval`, row-major, of a part of a tensor, 1-D. Only blocks with rows of that are loaded.

    Args:
        blocks: that have each element of the whole tensor once.
    """
    row_numel = math.prod(box.local_shape[1:])
    if interval.numel == 0 or row_numel == 0:
        return torch.empty(0)
    rows = Interval(interval.start // row_numel, -(-interval.stop // row_numel))
    part = box.narrow(0, rows)
    wanted = list(part.slices())
    buffer: torch.Tensor | None = None
    for block in blocks:
        common = [both for there, here in wanted if (both := _overlap(block, there, here)) is not None]
        if not common:
            continue
        values = block.load()
        if buffer is None:
            buffer = torch.empty(part.local_shape, dtype=values.dtype)
        for in_block, in_part in common:
            buffer[in_part] = values[in_block]
    assert buffer is not None
    first = interval.start - rows.start * row_numel
    return buffer.reshape(-1)[first : first + interval.numel]


def _overlap(block: SavedBlock, there: _Slices, here: _Slices) -> tuple[_Slices, _Slices] | None:
    """Returns the common elements of two blocks, in the saved one and in the part.

    Args:
        there, here: the other block, in the whole tensor and in the part.
    """
    in_block, in_part = [], []
    for offset, size, whole, own in zip(block.offsets, block.sizes, there, here, strict=True):
        start, stop = max(offset, whole.start), min(offset + size, whole.stop)
        if start >= stop:
            return None
        in_block.append(slice(start - offset, stop - offset))
        in_part.append(slice(start - whole.start + own.start, stop - whole.start + own.start))
    return tuple(in_block), tuple(in_part)
