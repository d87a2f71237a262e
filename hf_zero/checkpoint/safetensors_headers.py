"""Reads headers of safetensors files, and checks each before its values are used."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hashes import refuse_read_ahead
from .json_files import is_shape, is_size

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
