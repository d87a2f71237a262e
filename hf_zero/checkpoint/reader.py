"""Reads the rows of a `zero/` folder: only the bytes a rank needs, for any world size and stage of the writers."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..layout.intervals import Interval
from ..layout.pieces import pieces_for
from ..read_ahead import ask_for
from .faults import CheckpointError, read_fault, shown
from .files import refuse_links
from .manifest import STACKS, Manifest, SavedRow, SavedRows, named_save, refuse_other_save
from .mapped_tensors import dtype_named, mapped_tensors
from .safetensors_headers import save_in


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
        """Lists a parameter's kinds of state with one value per element, and each tensor of a stack by number."""
        own = self.manifest.own_shapes.get(name, {})
        kinds = self.manifest.kinds.get(name, ())
        stacked = (_numbered(kind, own[kind][0]) for kind in kinds if kind in own and kind in STACKS)
        return tuple(chain((kind for kind in kinds if kind not in own), *stacked))

    def scalars_of(self, name: str) -> dict[str, Any]:
        """Returns the state of a parameter as a whole: scalars, and tensors of their own shape. All tensors are new."""
        scalars = {key: _revive(value) for key, value in self.manifest.scalars.get(name, {}).items()}
        own = self.manifest.own_shapes.get(name, {})
        return scalars | {
            kind: self.read(kind, name, Interval(0, math.prod(shape))).view(shape)
            for kind, shape in own.items()
            if kind not in STACKS
        }

    def check_names(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises `CheckpointError` unless the checkpoint has exactly these parameters and shapes."""
        saved = self.manifest.shapes
        missing = [name for name in shapes if name not in saved]
        extra = [name for name in saved if name not in shapes]
        other = [name for name in shapes if name in saved and saved[name] != shapes[name]]
        for names, fault in (
            (missing, "is not in the checkpoint"),
            (extra, "is in the checkpoint but is not trained in this run"),
        ):
            if names:
                raise CheckpointError(
                    f"hf_zero: {self._folder}: {shown(names[0])!r} {fault} ({len(names)} such parameters). Resume with the "
                    "model and the frozen parameters that the checkpoint was made with."
                )
        if other:
            raise CheckpointError(
                f"hf_zero: {self._folder}: {shown(other[0])!r} has shape {shown(saved[other[0]])} in the checkpoint and "
                f"{shapes[other[0]]} in the model. Resume with the model config that the checkpoint was made with."
            )

    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        """Reads the elements `interval` of one kind of state of one whole parameter as a 1-D host tensor."""
        beginning, _, number = kind.rpartition(".")
        if number.isdecimal() and f"{beginning}.*" in self.manifest.own_shapes.get(name, {}):
            kind, interval = f"{beginning}.*", interval.shift(int(number) * math.prod(self.manifest.shapes[name]))
        runs = self._runs.get((kind, name))
        if runs is None:
            # Sort once per tensor: a resume reads each parameter's rows separately.
            runs = self._runs[kind, name] = _Runs(self.manifest, self._rows.get((kind, name), []))
        saved = list(self._here(runs.about(interval)))
        try:
            pieces = pieces_for(interval, saved)
        except ValueError as error:
            raise CheckpointError(
                f"hf_zero: {self._folder}: {shown(kind)} of {shown(name)!r}: {error}; the checkpoint is damaged, resume from "
                "an earlier one."
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
                    f"hf_zero: {self._folder} has no {file}: the parts of this checkpoint are on the disks of several hosts. "
                    "Resume on the same hosts with as many ranks, or pass the other parts to `hf-zero consolidate` (--part)."
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
                        f"hf_zero: {path} is from {named_save(save)}, but the manifest is from {self.manifest.identity}; copy "
                        "the file of that save there, or resume from another checkpoint."
                    )
                self._files[file] = tensors
            whole = self._files[file][row.key]
        except KeyError as error:
            raise CheckpointError(
                f"hf_zero: {path} has no {shown(error)}; the checkpoint is damaged, resume from an earlier one."
            ) from error
        except OSError as error:
            raise CheckpointError(f"hf_zero: {path} {read_fault(error)}; resume from an earlier checkpoint.") from error
        # Compare the file's header with the manifest: if they disagree, the slice below would select different elements.
        if whole.shape != (row.interval.numel,) or whole.dtype != dtype_named(row.dtype):
            raise CheckpointError(
                f"hf_zero: {path} has {shown(row.key)!r} of shape {tuple(whole.shape)} and {whole.dtype}, but the manifest "
                f"states {row.interval.numel} elements of {row.dtype}; the checkpoint is damaged, resume from an earlier one."
            )
        values = whole[interval.start : interval.stop]
        # Read ahead the whole run: page by page, a network disk would answer one request after the other.
        ask_for(values)
        # Clone, because a view would keep the whole file mapped for as long as the state exists.
        return values.clone()


@lru_cache(maxsize=8)
def _numbered(stack: str, count: int) -> tuple[str, ...]:
    """Names the tensors of a stack. Cached, because many parameters have stacks of as many tensors."""
    return tuple(f"{stack[:-1]}{number}" for number in range(count))


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
