"""The manifest lists the file of each element of each parameter's state. Written last, it completes a checkpoint."""

import dataclasses
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
import xxhash

from ..layout.boxes import Box
from ..layout.intervals import EvenCuts, Interval, even_cuts, joined_intervals
from .faults import CheckpointError, shown
from .files import is_inside, refuse_links, replace_file
from .hashes import HASH_DIGITS, FileRecord, Written
from .json_files import is_shape, is_size, parse_json, read_text

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 9

WEIGHTS = "weights"
"""The kind of the rows with the model's own weights, in a checkpoint of layout `sharded`."""

STACKS = ("residual.*", "residual.between.*")
"""Kinds of state that several ranks have for the same elements of a parameter. Their rows are those of one tensor: all the ranks'
tensors, stacked along a first dimension. A reader calls each of these tensors by its number instead of the star."""

_NESTED = "nested."
"""Prefix of the `scalars` entry which describes a list, tuple or dict in the optimizer's state."""

_LARGEST_BYTES = 2**30
"""Limit of a manifest's size. 70 B parameters on 4,096 ranks have a manifest of some MB."""


@dataclass(frozen=True, kw_only=True)
class SavedRow:
    """A run of one parameter's state, 1-D, under `key` in the file of `rank`; dtype in safetensors' spelling ("F32").

    `interval` counts the elements of `box`, the rank's part of the parameter; None means the whole parameter.
    """

    kind: str
    name: str
    interval: Interval
    rank: int
    dtype: str
    box: Box | None = None

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class SavedRows:
    """Rows of one kind of state of one parameter, adjacent to each other, in the files of evenly spaced ranks.

    The manifest stores these instead of every row, and computes rows when they are needed, so its size does not depend on the
    number of ranks. A row without a neighbor is a `SavedRows` of one rank.
    """

    kind: str
    name: str
    cuts: EvenCuts
    ranks: range
    dtype: str
    box: Box | None = None

    def row(self, index: int) -> SavedRow:
        return SavedRow(
            kind=self.kind,
            name=self.name,
            interval=self.cuts.interval(index),
            rank=self.ranks[index],
            dtype=self.dtype,
            box=self.box,
        )

    def about(self, wanted: Interval) -> Iterator[SavedRow]:
        """Yields the rows with an element of `wanted`, which counts elements of the box."""
        return map(self.row, self.cuts.about(wanted))

    def __iter__(self) -> Iterator[SavedRow]:
        return map(self.row, range(len(self.ranks)))


def joined_rows(rows: Iterable[SavedRow]) -> tuple[SavedRows, ...]:
    """Merges the rows of all ranks into as few `SavedRows` as their cuts allow."""
    alike: dict[tuple[str, str, str, Box | None], list[tuple[Interval, int]]] = {}
    for row in rows:
        alike.setdefault((row.kind, row.name, row.dtype, row.box), []).append((row.interval, row.rank))
    return tuple(
        SavedRows(kind=kind, name=name, cuts=cuts, ranks=ranks, dtype=dtype, box=box)
        for (kind, name, dtype, box), parts in alike.items()
        for cuts, ranks in even_cuts(parts)
    )


def _ranks_of(rows: Iterable[SavedRows]) -> list[range]:
    """Returns the ranks whose files contain these rows. Ranges with different steps may share ranks."""
    # The rows of different parameters have overlapping ranges of ranks. Joined, the ranges list each rank about once, not once
    # per row.
    found: dict[tuple[int, int], list[Interval]] = {}
    for each in rows:
        index, offset = divmod(each.ranks.start, each.ranks.step)
        found.setdefault((each.ranks.step, offset), []).append(Interval(index, index + len(each.ranks)))
    return [
        range(offset + start * step, offset + stop * step, step)
        for (step, offset), indices in found.items()
        for start, stop in joined_intervals(indices)
    ]


def row_file(rank: int, world_size: int) -> str:
    """Names the file of a rank's rows."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


_ROW_FILE = re.compile(r"rank-(\d{5,19})-of-\d{5,19}\.safetensors")


def rank_of(file: str, world_size: int) -> int | None:
    """Returns the rank in the name of a row file; None for a name of another form or with another number of ranks."""
    found = _ROW_FILE.fullmatch(file)
    return (
        int(found[1]) if found and file == row_file(int(found[1]), world_size) and int(found[1]) < world_size else None
    )


@dataclass(frozen=True, kw_only=True)
class SavedWeight:
    """A tensor of the model, by its name in `save_pretrained`; dtype in safetensors' spelling ("F32")."""

    dtype: str
    shape: tuple[int, ...]


def new_save() -> str:
    """Makes the ID of a save. All ranks must use the same one."""
    return uuid.uuid4().hex


_SAVE = re.compile(r"(?:[0-9a-f]{32})?")
"""IDs of `new_save`, and the empty ID of checkpoints from before IDs were introduced."""


@dataclass(frozen=True, kw_only=True)
class SaveIdentity:
    """Identifies the save which wrote a part of a checkpoint. All parts of one checkpoint have equal identities.

    Attributes:
        save: ID of the save; "" in checkpoints from before there were IDs, which only the other fields distinguish.
        contents: checksum of the parameters' names and shapes, and of the state with one value per parameter.
        written_at: date of the manifest. Not compared, as each disk has its own manifest.
    """

    save: str
    step: int | None
    world_size: int
    contents: str
    written_at: str = field(default="", compare=False)

    def __str__(self) -> str:
        known = [
            "" if self.step is None else f"step {self.step}",
            f"{self.world_size} rank{'' if self.world_size == 1 else 's'}",
            self.written_at,
        ]
        return f"{named_save(self.save)} ({', '.join(filter(None, known))})"


def named_save(save: str) -> str:
    """Formats the ID of a save for an error."""
    return f"save {shown(save[:8])}" if save else "a save without an ID"


def refuse_other_save(one: str, identity: SaveIdentity, other: str, its: SaveIdentity) -> None:
    """Raises `CheckpointError` if two parts of a checkpoint, with these names, are of different saves."""
    if identity != its:
        raise CheckpointError(
            f"hf_zero: {one} and {other} are not parts of one checkpoint: {one} is from {identity}, and {other} is from {its}. "
            "Pass the parts that one save wrote."
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a `zero/` folder.

    Attributes:
        shapes: parameter name → its whole shape.
        kinds: parameter name → the kinds of state that have rows. A kind whose rows are lost is found by this.
        scalars: parameter name → state name → one value for the whole parameter.
        rows: all ranks' rows of masters, optimizer state and weights.
        own_shapes: parameter name → kind → shape, for state tensors without exactly one value per element of the parameter.
            Their rows count the elements of the state tensor.
        optimizers: for each optimizer its class, and its groups with settings and parameter names.
        files: every file of the checkpoint except the manifest, by its path relative to the parent of the manifest's folder; if
            hosts have separate disks, only the files on this one.
        weights: the model's tensors if they are stored in rows (layout `sharded`); {} if the folder has weights files.
        is_kept: rotation does not delete this checkpoint.
        base: checksum of the frozen parameters that the checkpoint's adapters belong to; None if the checkpoint has the whole
            model.
        elsewhere: row files that are on other hosts' disks.
        save: ID that all parts of the checkpoint share, on every disk; "" in formats 4 and 5.
        step: the optimizer step after which it was written; None in old states of accelerate loops.
        written_at: date and time, UTC, in ISO 8601; "" before the manifest is written.
        written: the parts that this rank wrote, with their hashes in memory; not stored in the file.
    """

    world_size: int
    stage: int
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, tuple[str, ...]]
    rows: tuple[SavedRows, ...]
    scalars: dict[str, dict[str, Any]]
    optimizers: tuple[dict[str, Any], ...]
    own_shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    weights: dict[str, SavedWeight] = field(default_factory=dict)
    is_kept: bool = False
    base: str | None = None
    elsewhere: tuple[str, ...] = ()
    step: int | None = None
    written_at: str = ""
    save: str = ""
    written: tuple[Written, ...] = field(default=(), compare=False)

    @property
    def identity(self) -> SaveIdentity:
        """Returns the values shared by all parts of this checkpoint."""
        return SaveIdentity(
            save=self.save,
            step=self.step,
            world_size=self.world_size,
            contents=_hash({"shapes": self.shapes, "scalars": self.scalars}),
            written_at=self.written_at,
        )

    def box_of(self, row: SavedRow | SavedRows) -> Box:
        """Returns the part of the whole tensor whose elements the row's interval counts."""
        return Box.whole(self.whole_shape(row.kind, row.name) or ()) if row.box is None else row.box

    def file_of(self, row: SavedRow) -> str:
        """Names the file of a row."""
        return row_file(row.rank, self.world_size)

    def writers(self) -> list[int]:
        """Lists the ranks whose files have rows, in order."""
        return sorted({rank for ranks in _ranks_of(self.rows) for rank in ranks})

    def with_files(self, files: Mapping[str, FileRecord]) -> "Manifest":
        """Returns a copy of the manifest with these files."""
        return dataclasses.replace(self, files=dict(files))

    def whole_shape(self, kind: str, name: str) -> tuple[int, ...] | None:
        """Returns the shape of one kind of state of a parameter, or of a tensor of the model; None for an unknown one."""
        if kind == WEIGHTS:
            return self.weights[name].shape if name in self.weights else None
        if kind not in self.kinds.get(name, ()):
            return None
        return self.own_shapes.get(name, {}).get(kind, self.shapes[name])

    def write(self, folder: Path) -> None:
        """Writes `manifest.json` atomically, with a hash of the content.

        Raises:
            CheckpointError: the file would be longer than `read` accepts.
        """
        boxes = dict.fromkeys(rows.box for rows in self.rows if rows.box is not None)
        numbers = {box: number for number, box in enumerate(boxes)}
        content = {
            "format_version": FORMAT_VERSION,
            "save": self.save,
            "world_size": self.world_size,
            "stage": self.stage,
            "versions": self.versions,
            "optimizers": list(self.optimizers),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "kinds": {name: list(kinds) for name, kinds in self.kinds.items()},
            "scalars": self.scalars,
            "own_shapes": {
                name: {kind: list(shape) for kind, shape in shapes.items()} for name, shapes in self.own_shapes.items()
            },
            "rows": [
                [
                    *(r.kind, r.name, r.dtype, None if r.box is None else numbers[r.box], r.ranks.start, r.ranks.step),
                    *(r.cuts.start, r.cuts.cut, r.cuts.numel, r.cuts.stop),
                ]
                for r in self.rows
            ],
            "weights": {name: [weight.dtype, list(weight.shape)] for name, weight in self.weights.items()},
            "is_kept": self.is_kept,
            "base": self.base,
            "step": self.step,
            "written_at": self.written_at,
            "elsewhere": list(self.elsewhere),
            "files": {
                name: [record.size, record.chunk_bytes, "".join(record.xxh3)] for name, record in self.files.items()
            },
            "boxes": [[list(box.shape), box.ranges] for box in numbers],
        }
        text = _text({**content, "xxh3": _hash(content)})
        # Raise here, not at a resume, when the run can no longer be saved in a different way. The text is ASCII.
        if len(text) > _LARGEST_BYTES:
            raise CheckpointError(
                f"{MANIFEST_NAME} would have {len(text)} bytes; allowed: at most {_LARGEST_BYTES}: {len(self.rows)} entries "
                f"for parameter shards, and checksums of {sum(record.size for record in self.files.values())} bytes in "
                f"{len(self.files)} files. Train with a larger `bucket_bytes`, or shard within groups (`comm.shard_group_size`)"
            )
        replace_file(folder / MANIFEST_NAME, text)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest. Raises `CheckpointError` if it is missing, damaged or of an unknown version."""
        path = folder / MANIFEST_NAME
        # Check first: a link in a folder from the Hub could point to any file of this user.
        refuse_links(folder.parent, [folder, path])
        if not path.is_file():
            found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
            raise CheckpointError(
                f"hf_zero: {folder} holds no {MANIFEST_NAME}, so it is not a complete hf_zero checkpoint "
                f"({'the folder does not exist' if found is None else f'found: {found[:8]}'}). Resume from a checkpoint folder "
                "that hf_zero wrote, or start without resume_from_checkpoint."
            )
        text = read_text(path, most_bytes=_LARGEST_BYTES)
        content = parse_json(text, path)
        # Check the version before the hash: a file of another version is not damaged, and its error must name the version.
        version = content.get("format_version") if isinstance(content, dict) else None
        if type(version) is int and version not in _FIELDS:
            raise CheckpointError(
                f"hf_zero: {path} has format version {str(version)[:20]}, and this version of hf_zero reads {min(_FIELDS)} to "
                f"{max(_FIELDS)}."
            )
        if type(version) is not int or not _is_as_written(content, text):
            raise CheckpointError(
                f"hf_zero: {path} is damaged (its own checksum does not match); resume from an earlier checkpoint."
            )
        try:
            manifest = _of_content(content, folder)
            # Until here, each field was parsed separately. A row beyond its parameter would read another row's bytes.
            _refuse_contradictions(manifest)
        except _FieldError as error:
            raise CheckpointError(
                f"hf_zero: {path} is damaged ({error}); resume from an earlier checkpoint."
            ) from error
        return manifest


def _of_content(content: dict[str, Any], folder: Path) -> Manifest:
    version = content["format_version"]
    held = _as_fields(content, "the manifest", {"format_version", *_FIELDS[version]})
    world_size = _as_size(held["world_size"], "world_size")
    rows = _rows(held, world_size) if version >= _WITH_CUTS else _rows_one_by_one(folder, held, world_size)
    return Manifest(
        world_size=world_size,
        rows=rows,
        stage=_as_size(held["stage"], "stage"),
        shapes=_as_mapping(held["shapes"], "shapes", _as_shape),
        kinds=_as_mapping(held["kinds"], "kinds", lambda kinds, what: _as_list(kinds, what, _as_text)),
        scalars=_as_mapping(held["scalars"], "scalars", lambda values, what: _as_mapping(values, what, _as_scalar)),
        optimizers=_as_list(held["optimizers"], "optimizers", _as_optimizer),
        own_shapes=_as_mapping(
            held["own_shapes"], "own_shapes", lambda shapes, what: _as_mapping(shapes, what, _as_shape)
        ),
        versions=_as_mapping(held["versions"], "versions", _as_text),
        weights=_as_mapping(held["weights"], "weights", _weight),
        is_kept=_as_bool(held["is_kept"], "is_kept"),
        base=None if held["base"] is None else _as_text(held["base"], "base"),
        step=None if held["step"] is None else _as_size(held["step"], "step"),
        written_at=_as_text(held["written_at"], "written_at"),
        elsewhere=_as_list(held["elsewhere"], "elsewhere", _as_text),
        files={
            name: _record(folder, name, *record)
            for name, record in _as_mapping(
                held["files"], "files", _record_parts if version >= _WITH_CHUNK_BYTES else _size_and_hashes
            ).items()
        },
        save=_as_save(held.get("save", ""), "save"),
    )


_WITH_CUTS = 7
"""First format whose rows are `EvenCuts`."""

_WITH_CHUNK_BYTES = 9
"""First format whose files have chunks of different sizes."""

_ALL_FIELDS = frozenset(field.name for field in dataclasses.fields(Manifest)) - {"written"} | {"boxes"}
_FIELDS = {
    4: _ALL_FIELDS - {"boxes", "save"},
    # Models split over ranks.
    5: _ALL_FIELDS - {"save"},
    # One entry per row and rank.
    6: _ALL_FIELDS,
    # Residuals of each rank as a kind.
    _WITH_CUTS: _ALL_FIELDS,
    # Chunks of 256 KiB in all files.
    8: _ALL_FIELDS,
    FORMAT_VERSION: _ALL_FIELDS,
}
"""Format version → the fields of its manifest."""


def _refuse_contradictions(manifest: Manifest) -> None:
    """Raises `_FieldError` if a field names a parameter, kind, element or file that is unknown to the other fields."""
    for name in ("kinds", "scalars", "own_shapes"):
        _refuse_unknown(manifest.shapes, getattr(manifest, name), name)
    for optimizer in manifest.optimizers:
        for group in optimizer["groups"]:
            _refuse_unknown(manifest.shapes, dict.fromkeys(group["parameters"]), "optimizers")
            _refuse_mixed({name: manifest.scalars.get(name, {}) for name in group["parameters"]}, "scalars")
    for rows in manifest.rows:
        whole = manifest.whole_shape(rows.kind, rows.name)
        if whole is None:
            raise _FieldError(f"rows have {rows.kind[:200]!r} of {rows.name[:200]!r}, but `kinds` does not")
        box = manifest.box_of(rows)
        if box.shape != whole:
            raise _FieldError(
                f"`boxes` have a part of shape {box.shape} of {rows.name[:200]!r}, but its shape is {whole}"
            )
        _refuse_beyond(*rows.cuts.whole, box.local_shape, f"a row of {rows.kind} of {rows.name[:200]!r}")
    # After these checks, no loop over ranks is longer than the lists of files, however many ranks a row counts.
    files = {*manifest.elsewhere, *(PurePosixPath(name).name for name in manifest.files)}
    for rank in (rank for ranks in _ranks_of(manifest.rows) for rank in ranks):
        file = row_file(rank, manifest.world_size)
        if file not in files:
            raise _FieldError(f"{file} has rows but is not among the files")
    for name, kinds in manifest.kinds.items():
        for kind in (kind for kind in kinds if kind in STACKS):
            shape, each = manifest.own_shapes.get(name, {}).get(kind, ()), manifest.shapes[name]
            if not shape or shape[1:] != each or not 0 < shape[0] <= len(files):
                raise _FieldError(
                    f"own_shapes have {str(shape)[:80]} for {kind!r} of {name[:200]!r} with {str(each)[:80]}, but there are "
                    f"{len(files)} files"
                )


def _rows(held: Mapping[str, Any], world_size: int) -> tuple[SavedRows, ...]:
    boxes = _as_list(held["boxes"], "boxes", _box)

    def rows(value: Any, what: str) -> SavedRows:
        kind, name, dtype, number, *counts = _as_items(value, what, 10)
        first, step, start, cut, numel, stop = (_as_size(count, f"{what}[{at}]") for at, count in enumerate(counts, 4))
        cuts = EvenCuts(start, cut, numel, stop)
        if not cuts.is_valid:
            raise _FieldError(f"{what} cuts elements {start} to {stop} at {cut} and every {numel}")
        if step < 1 or first + (cuts.count - 1) * step >= world_size:
            raise _FieldError(f"{what} is of {cuts.count} of {world_size} ranks from {first} on, each {step}th")
        if number is not None and _as_size(number, f"{what}.box") >= len(boxes):
            raise _FieldError(f"{what} has box {number} of {len(boxes)}")
        return SavedRows(
            kind=_as_text(kind, f"{what}.kind"),
            name=_as_text(name, f"{what}.name"),
            cuts=cuts,
            ranks=range(first, first + (cuts.count - 1) * step + 1, step),
            dtype=_as_text(dtype, f"{what}.dtype"),
            box=None if number is None else boxes[number],
        )

    return _as_list(held["rows"], "rows", rows)


def _rows_one_by_one(folder: Path, held: Mapping[str, Any], world_size: int) -> tuple[SavedRows, ...]:
    """Parses the rows of formats before 7: each row with its file and key, and the boxes of each file."""
    boxes = _as_mapping(held.get("boxes", {}), "boxes", lambda boxes, what: _as_mapping(boxes, what, _box))

    def row(value: Any, what: str) -> SavedRow:
        kind, name, start, stop, file, key, dtype = _as_items(value, what, 7)
        rank = rank_of(_as_text(file, f"{what}.file"), world_size)
        if rank is None:
            raise CheckpointError(
                f"hf_zero: {folder / MANIFEST_NAME} names {file[:200]!r}, which is not a file of that folder."
            )
        found = SavedRow(
            kind=_as_text(kind, f"{what}.kind"),
            name=_as_text(name, f"{what}.name"),
            interval=Interval(_as_size(start, f"{what}.start"), _as_size(stop, f"{what}.stop")),
            rank=rank,
            dtype=_as_text(dtype, f"{what}.dtype"),
            box=boxes.get(file, {}).get(name) if isinstance(name, str) else None,
        )
        if key != found.key:
            raise _FieldError(f"{what} is stored as {str(key)[:200]!r}; expected: {found.key[:200]!r}")
        if found.interval.start > found.interval.stop:
            raise _FieldError(f"{what} has elements {start} to {stop}")
        return found

    return joined_rows(_as_list(held["rows"], "rows", row))


def _box(value: Any, what: str) -> Box:
    shape, ranges = _as_items(value, what, 2)
    whole = _as_shape(shape, f"{what}.shape")
    found = _as_list(ranges, f"{what}.ranges", lambda along, where: _as_list(along, where, _range))
    if len(found) != len(whole):
        raise _FieldError(f"{what} has ranges along {len(found)} dimensions of {len(whole)}")
    for size, along in zip(whole, found):
        ends = [0, *(end for each in along for end in each), size]
        if ends != sorted(ends):
            raise _FieldError(f"{what} has ranges that overlap or go beyond {size}")
    return Box(whole, found)


def _range(value: Any, what: str) -> Interval:
    start, stop = _as_items(value, what, 2)
    return Interval(_as_size(start, f"{what}.start"), _as_size(stop, f"{what}.stop"))


def _weight(value: Any, what: str) -> SavedWeight:
    dtype, shape = _as_items(value, what, 2)
    return SavedWeight(dtype=_as_text(dtype, f"{what}.dtype"), shape=_as_shape(shape, f"{what}.shape"))


def _record_parts(value: Any, what: str) -> tuple[int, int, str]:
    nbytes, chunk_bytes, xxh3 = _as_items(value, what, 3)
    if _as_size(chunk_bytes, f"{what}.chunk_bytes") < 1:
        raise _other(chunk_bytes, f"{what}.chunk_bytes", "at least 1")
    return _as_size(nbytes, f"{what}.size"), chunk_bytes, _as_text(xxh3, f"{what}.xxh3")


def _size_and_hashes(value: Any, what: str) -> tuple[int, int, str]:
    """Parses the record of a file in formats before 9."""
    nbytes, xxh3 = _as_items(value, what, 2)
    return _as_size(nbytes, f"{what}.size"), _CHUNK_BYTES_BEFORE, _as_text(xxh3, f"{what}.xxh3")


_CHUNK_BYTES_BEFORE = 256 * 2**10
"""Bytes per checksum of all files in formats before 9."""


def _record(folder: Path, name: str, size: int, chunk_bytes: int, xxh3: str) -> FileRecord:
    if not is_inside(name):
        raise CheckpointError(
            f"hf_zero: {folder / MANIFEST_NAME} names {name[:200]!r}, which is not inside its checkpoint."
        )
    record = FileRecord(size=size, chunk_bytes=chunk_bytes)
    # Count here: the check of a file looks up hashes by chunk, and too few would raise an IndexError.
    if len(xxh3) != HASH_DIGITS * record.chunks:
        raise CheckpointError(
            f"hf_zero: {folder / MANIFEST_NAME} has {len(xxh3)} digits of checksums for {name!r} of {size} bytes."
        )
    hashes = (xxh3[at : at + HASH_DIGITS] for at in range(0, len(xxh3), HASH_DIGITS))
    return dataclasses.replace(record, xxh3=tuple(hashes))


def _is_as_written(content: dict[str, Any], text: str) -> bool:
    """Whether a manifest matches its hash, which is removed, and its own spelling: one flipped bit turns `1e-8` into `1E-8`."""
    try:
        # Compare the text first, while the hash is included. Then remove the hash: it covers the other fields, and a later check
        # refuses unknown fields.
        return text == _text(content) and content.pop("xxh3", None) == _hash(content)
    except RecursionError:
        return False


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1)


def _hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


Value = TypeVar("Value")


class _FieldError(ValueError):
    """A value differs from the format. The message names the field."""


def _as_mapping(value: Any, what: str, of: Callable[[Any, str], Value]) -> dict[str, Value]:
    """Checks a mapping, and each value with `of`."""
    if not isinstance(value, dict):
        raise _other(value, what, "a mapping")
    return {name: of(each, f"{what} of {name[:200]!r}") for name, each in value.items()}


def _as_list(value: Any, what: str, of: Callable[[Any, str], Value]) -> tuple[Value, ...]:
    """Checks a list, and each value with `of`."""
    if not isinstance(value, list):
        raise _other(value, what, "a list")
    return tuple(of(each, f"{what}[{number}]") for number, each in enumerate(value))


def _as_fields(value: Any, what: str, names: set[str]) -> dict[str, Any]:
    """Checks a mapping with exactly these names."""
    if not isinstance(value, dict) or value.keys() != names:
        raise _other(value, what, f"a mapping of {', '.join(sorted(names))}")
    return value


def _as_items(value: Any, what: str, count: int) -> list[Any]:
    """Checks a list of this length."""
    if not isinstance(value, list) or len(value) != count:
        raise _other(value, what, f"a list of {count}")
    return value


def _as_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _other(value, what, "a string")
    return value


def _as_save(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _SAVE.fullmatch(value):
        raise _other(value, what, "the ID of a save")
    return value


def _as_bool(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise _other(value, what, "true or false")
    return value


def _as_size(value: Any, what: str) -> int:
    """Checks a whole number from 0 on within torch's limits."""
    if not is_size(value):
        raise _other(value, what, "a whole number from 0 to 2**63")
    return value


def _as_shape(value: Any, what: str) -> tuple[int, ...]:
    if not is_shape(value):
        raise _other(value, what, "a list of sizes")
    return tuple(value)


def _as_scalar(value: Any, what: str) -> Any:
    """Checks a parameter's scalar: a number, a string, a boolean, None, or a tensor as `{"dtype", "value"}`."""
    if isinstance(value, dict):
        held = _as_fields(value, what, {"dtype", "value"})
        dtype = getattr(torch, _as_text(held["dtype"], f"{what}.dtype"), None)
        if not isinstance(dtype, torch.dtype):
            raise _other(held["dtype"], f"{what}.dtype", "the name of a dtype")
        number = held["value"]
        is_held = (
            dtype.is_floating_point if isinstance(number, float) else isinstance(number, int) and abs(number) < 2**63
        )
        if not is_held:
            raise _other(number, f"{what}.value", f"a number that a tensor of {dtype} can hold")
        return value
    if not isinstance(value, bool | int | float | str | None):
        raise _other(value, what, "a number, a string, true, false or null")
    return value


def _as_optimizer(value: Any, what: str) -> dict[str, Any]:
    """Checks a class name, and groups of settings and parameter names."""
    # `own` is absent if the class adds no values to its state dict.
    names = {"class", "groups"} | ({"own"} if isinstance(value, dict) and "own" in value else set())
    held = _as_fields(value, what, names)
    _as_text(held["class"], f"{what}.class")
    if not isinstance(held.get("own", {}), dict):
        raise _other(held["own"], f"{what}.own", "a mapping")
    _as_list(held["groups"], f"{what}.groups", _as_group)
    return held


def _refuse_unknown(known: Mapping[str, Any], names: Mapping[str, Any], what: str) -> None:
    """Raises `_FieldError` unless all names are known."""
    for name in names:
        if name not in known:
            raise _FieldError(f"{what} has {name[:200]!r}, which is not the name of a parameter")


def _refuse_mixed(scalars: Mapping[str, Mapping[str, Any]], what: str) -> None:
    """Raises `_FieldError` if a state is a tensor for some of a group's parameters and a plain value for others.

    torch steps a group's parameters together, and fails on such a mixture in the middle of a step.
    """
    form: dict[str, tuple[bool, str]] = {}
    for name, values in scalars.items():
        for key, value in values.items():
            # Skip values in lists, which only the optimizer itself uses: torch's optimizers store none there.
            if value is None or f"{_NESTED}{key.rpartition('.')[0]}" in values:
                continue
            is_tensor = isinstance(value, dict)
            was_tensor, other = form.setdefault(key, (is_tensor, name))
            if is_tensor != was_tensor:
                raise _FieldError(
                    f"{what} has {key[:80]!r} as a tensor for one of {other[:200]!r} and {name[:200]!r}, but as a plain value "
                    "for the other"
                )


def _refuse_beyond(start: int, stop: int, whole: tuple[int, ...], what: str) -> None:
    """Raises `_FieldError` unless elements `start` to `stop` are inside a tensor of shape `whole`."""
    if not start <= stop <= math.prod(whole):
        raise _FieldError(f"{what} has elements {start} to {stop} of {math.prod(whole)}")


def _as_group(value: Any, what: str) -> dict[str, Any]:
    held = _as_fields(value, what, {"settings", "parameters"})
    if not isinstance(held["settings"], dict):
        raise _other(held["settings"], f"{what}.settings", "a mapping")
    _as_list(held["parameters"], f"{what}.parameters", _as_text)
    return held


def _other(value: Any, what: str, due: str) -> _FieldError:
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return _FieldError(f"{what} is {shown[:80]}{'…' if len(shown) > 80 else ''}; expected: {due}")
