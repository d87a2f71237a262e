"""Reads tensors of checkpoints: only the bytes a rank needs, for any world size and stage of the writers."""

import io
import math
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from ..device import ask_for
from ..layout.boxes import Box
from ..layout.intervals import Interval
from ..layout.pieces import pieces_for
from .files import CheckpointError, is_whole_safetensors, read_fault, refuse_links, save_in, spans_in
from .manifest import Manifest, SavedRow, SavedRows, named_save, refuse_other_save
from .writer import DTYPE_NAMES

# ---- Tensors of a safetensors file in memory-mapped pages, which are only read on access ----

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype of a safetensors name. Raises `CheckpointError` for a dtype unknown to torch."""
    if name not in _DTYPES:
        raise CheckpointError(f"hf_zero: dtype {name} of a safetensors file is none of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def mapped_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Maps a safetensors file into memory: name → tensor. Writes to a tensor stay in this process.

    Raises:
        CheckpointError: the file is no complete safetensors file.
        OSError: the file cannot be read.
    """
    spans = spans_in(path)
    if spans is None or not is_whole_safetensors(path):
        raise CheckpointError(
            f"hf_zero: {path} cannot be read (its header is missing, or says another length); the checkpoint is damaged, "
            "resume from an earlier one."
        )
    with path.open("rb") as file:
        # Not safetensors' `get_tensor`: it touches a tensor's first page, so the system also reads the pages after it,
        # and a rank would read far more than its part.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    tensors = {}
    for name, span in spans.items():
        dtype = dtype_named(span.dtype)
        numel = (span.end - span.begin) // dtype.itemsize
        # torch makes no tensor from a buffer without elements.
        flat = (
            torch.frombuffer(pages, dtype=dtype, count=numel, offset=span.begin)
            if numel
            else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(span.shape)
    return tensors


# ---- Files of `torch.save` of unknown origin ----


class _BoundedReads(io.BufferedReader):
    """A file whose reads never allocate more than its remaining bytes. A pickle of nine bytes may ask for 4 GiB."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def load_tensors(path: Path) -> Any:
    """Loads a file of `torch.save` with tensors and plain values only. Memory-maps the tensors if the format allows mapping.

    Raises:
        Exception: of any class, if the file is damaged or contains objects of other classes.
    """
    if is_zipfile(path):
        # torch does not notice damage in a mapped file, so `is_zipfile` has looked for the archive's end first.
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    with _BoundedReads(io.FileIO(path)) as file:
        return torch.load(file, map_location="cpu", weights_only=True)


# ---- The rows of a `zero/` folder ----


class CheckpointReader:
    """Reads the rows of one `zero/` folder. A context manager: files stay open inside.

    Args:
        others: `zero/` folders of the same checkpoint on other hosts' disks, for files that are missing in this one.

    Raises:
        CheckpointError: a manifest is missing or damaged, or the folders are of different saves.
    """

    def __init__(self, folder: Path, others: Sequence[Path] = ()):
        self._folder = folder
        self._folders = [folder, *others]
        self.manifest = Manifest.read(folder)
        for other in others:
            refuse_other_save(
                str(folder.parent), self.manifest.identity, str(other.parent), Manifest.read(other).identity
            )
        self._files: dict[str, dict[str, torch.Tensor]] = {}
        self._paths: dict[str, Path] = {}
        self._rows: dict[tuple[str, str], list[SavedRows]] = {}
        self._runs: dict[tuple[str, str], _Runs] = {}
        for rows in self.manifest.rows:
            self._rows.setdefault((rows.kind, rows.name), []).append(rows)

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Lists a parameter's kinds of state with one value per element."""
        own = self.manifest.own_shapes.get(name, {})
        return tuple(kind for kind in self.manifest.kinds.get(name, ()) if kind not in own)

    def scalars_of(self, name: str) -> dict[str, Any]:
        """Returns the state of a parameter as a whole: scalars, and tensors of their own shape. All tensors are new."""
        scalars = {key: _revive(value) for key, value in self.manifest.scalars.get(name, {}).items()}
        own = self.manifest.own_shapes.get(name, {})
        return scalars | {
            kind: self.read(kind, name, Interval(0, math.prod(shape))).view(shape) for kind, shape in own.items()
        }

    def check_names(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises `CheckpointError` unless the checkpoint has exactly these parameters and shapes."""
        saved = self.manifest.shapes
        missing = [name for name in shapes if name not in saved]
        extra = [name for name in saved if name not in shapes]
        other = [name for name in shapes if name in saved and saved[name] != shapes[name]]
        for names, fault in (
            (missing, "is not in the checkpoint"),
            (extra, "is in the checkpoint but is not trained now"),
        ):
            if names:
                raise CheckpointError(
                    f"hf_zero: {self._folder}: {names[0]!r} {fault} ({len(names)} such parameters). Resume with the model "
                    "and the frozen parameters that the checkpoint was made with."
                )
        if other:
            raise CheckpointError(
                f"hf_zero: {self._folder}: {other[0]!r} has shape {saved[other[0]]} there and {shapes[other[0]]} in the "
                "model. Resume with the model config that the checkpoint was made with."
            )

    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        """Reads the elements `interval` of one kind of state of one whole parameter as a 1-D host tensor."""
        runs = self._runs.get((kind, name))
        if runs is None:
            # Sort once per tensor: a resume reads each parameter's rows separately.
            runs = self._runs[kind, name] = _Runs(self.manifest, self._rows.get((kind, name), []))
        saved = list(self._here(runs.about(interval)))
        try:
            pieces = pieces_for(interval, saved)
        except ValueError as error:
            raise CheckpointError(
                f"hf_zero: {self._folder}: {kind} of {name!r}: {error}; the checkpoint is damaged, resume from an earlier one."
            ) from error
        parts = [self._slice(piece.source[0], piece.in_source.shift(piece.source[1])) for piece in pieces]
        if not parts and (kind, name) in self._rows:
            # A tensor without elements, so only the row's dtype matters.
            return self._slice(self._rows[kind, name][0].row(0), Interval(0, 0))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _here(
        self, runs: Iterable[tuple[Interval, tuple[SavedRow, int]]]
    ) -> Iterator[tuple[Interval, tuple[SavedRow, int]]]:
        """Yields the runs, each after looking for its file: a manifest may count more ranks than there are files."""
        for interval, (row, start) in runs:
            self._path_of(self.manifest.file_of(row))
            yield interval, (row, start)

    def _path_of(self, file: str) -> Path:
        if file not in self._paths:
            found = [folder / file for folder in self._folders if (folder / file).is_file()]
            if not found:
                raise CheckpointError(
                    f"hf_zero: {self._folder} has no {file}: the disks of several hosts have a part of this checkpoint each. "
                    "Resume on the same hosts with as many ranks, or give `hf-zero consolidate` the other parts (--part)."
                )
            self._paths[file] = found[0]
        return self._paths[file]

    def _slice(self, row: SavedRow, interval: Interval) -> torch.Tensor:
        file = self.manifest.file_of(row)
        path = self._path_of(file)
        try:
            if file not in self._files:
                # Once per file, before the file is opened: the manifest's names are checked, but a link may still lead out of
                # the folder.
                refuse_links(path.parent.parent, [path])
                tensors, save = mapped_tensors(path), save_in(path)
                if save != self.manifest.save:
                    raise CheckpointError(
                        f"hf_zero: {path} is of {named_save(save)}, and the manifest of {self.manifest.identity}; put the file "
                        "of that save there, or resume from another checkpoint."
                    )
                self._files[file] = tensors
            whole = self._files[file][row.key]
        except KeyError as error:
            raise CheckpointError(
                f"hf_zero: {path} has no {error}; the checkpoint is damaged, resume from an earlier one."
            ) from error
        except OSError as error:
            raise CheckpointError(f"hf_zero: {path} {read_fault(error)}; resume from an earlier checkpoint.") from error
        # Compare the file's header with the manifest: if they disagree, the slice below would select different elements.
        if whole.shape != (row.interval.numel,) or whole.dtype != dtype_named(row.dtype):
            raise CheckpointError(
                f"hf_zero: {path} has {row.key!r} of shape {tuple(whole.shape)} and {whole.dtype}, and the manifest says "
                f"{row.interval.numel} elements of {row.dtype}; the checkpoint is damaged, resume from an earlier one."
            )
        values = whole[interval.start : interval.stop]
        # Read ahead the whole run: page by page, a network disk would answer one request after the other.
        ask_for(values)
        # Clone, because a view would keep the whole file mapped for as long as the state exists.
        return values.clone()


class _Runs:
    """The runs of one kind of a parameter's state which are also contiguous in the files' boxes, sorted by first element.

    A box of a parameter that is split over ranks may consist of many runs of the whole parameter.
    """

    def __init__(self, manifest: Manifest, saved: Sequence[SavedRows]):
        found = [
            (Interval(start, start + run.numel), (rows, run.start))
            for rows in saved
            for run, start in manifest.box_of(rows).runs(rows.cuts.whole)
        ]
        self._runs = sorted(found, key=lambda pair: pair[0])
        self._starts = [run.start for run, _ in self._runs]
        self._most = max((run.numel for run, _ in self._runs), default=0)

    def about(self, interval: Interval) -> Iterator[tuple[Interval, tuple[SavedRow, int]]]:
        """Yields the parts of the runs within the interval, each with its row and its start in the row."""
        # A run before the interval may reach into it, but no run is longer than `_most`.
        first = bisect_left(self._starts, interval.start - self._most)
        for run, (rows, at) in self._runs[first : bisect_left(self._starts, interval.stop)]:
            wanted = run.intersect(interval)
            if wanted is not None:
                in_box = wanted.shift(at - run.start)
                for row in rows.about(in_box):
                    part = row.interval.intersect(in_box)
                    assert part is not None
                    yield part.shift(run.start - at), (row, part.start - row.interval.start)


def _revive(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "value"}:
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    return value


# ---- A part of a tensor, assembled from blocks in checkpoints of other layouts ----

_Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class SavedBlock:
    """A rectangular block of a tensor: consecutive elements along each dimension.

    Attributes:
        offsets, sizes: in the whole tensor, one per dimension.
        load: returns the values, of shape `sizes`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], torch.Tensor]


def read_blocks(box: Box, interval: Interval, blocks: Iterable[SavedBlock]) -> torch.Tensor:
    """Reads the elements `interval`, in row-major order, of a part of a tensor as a 1-D tensor. Loads only overlapping blocks.

    Args:
        box: the part of the whole tensor.
        blocks: together contain each element of the whole tensor exactly once.
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
    """Returns the slices of the common elements of a saved block and a part, in the block and in the part; None without any.

    Args:
        there, here: the slices of a block of the part, in the whole tensor and in the part.
    """
    in_block, in_part = [], []
    for offset, size, whole, own in zip(block.offsets, block.sizes, there, here, strict=True):
        start, stop = max(offset, whole.start), min(offset + size, whole.stop)
        if start >= stop:
            return None
        in_block.append(slice(start - offset, stop - offset))
        in_part.append(slice(start - whole.start + own.start, stop - whole.start + own.start))
    return tuple(in_block), tuple(in_part)
