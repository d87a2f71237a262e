"""Reads headers of safetensors files, and checks each before anything relies on one."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import refuse_read_ahead

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

_MOST = 2**63
"""More than torch can count."""

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
    header_bytes, spans = header
    return path.stat().st_size == max([header_bytes, *(span.end for span in spans.values())])


def tensors_in(path: Path) -> dict[str, tuple[int, int]]:
    """Each tensor of a safetensors file: its first byte, and bytes an element. {} for a file that is cut off."""
    spans = spans_in(path) or {}
    numels = {name: math.prod(span.shape) for name, span in spans.items()}
    return {name: (span.begin, (span.end - span.begin) // numels[name]) for name, span in spans.items() if numels[name]}


def spans_in(path: Path) -> dict[str, TensorSpan] | None:
    """Tensor → its bytes in a safetensors file; None for a file of another kind."""
    header = _header_of(path) if path.is_file() else None
    return None if header is None else header[1]


def is_size(value: object) -> bool:
    """Whether a JSON value is a number of elements or bytes that torch can count."""
    return type(value) is int and 0 <= value < _MOST


def is_shape(value: object) -> bool:
    """Whether a JSON value is a list of sizes with a product that torch can count."""
    if not isinstance(value, list) or not all(is_size(size) for size in value):
        return False
    # Zeros aside: torch multiplies what is there besides.
    return math.prod(size for size in value if size) < _MOST


def _header_of(path: Path) -> tuple[int, dict[str, TensorSpan]] | None:
    """Reads a header: bytes up to the first tensor, and the tensors; None for a file of another kind."""
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
    return start, spans


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
