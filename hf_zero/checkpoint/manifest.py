"""The manifest: which element of which parameter's state lies in which file. Written last, it makes a checkpoint whole."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..layout.intervals import Interval
from .files import HASH_DIGITS, FileRecord, chunks_in, is_inside, sync

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 3

WEIGHTS = "weights"
"""The kind of the rows that hold the model itself, in a checkpoint of layout `sharded`."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written: names the folder or file, what is wrong, and what to do."""


@dataclass(frozen=True, kw_only=True)
class SavedRow:
    """A run of one parameter's state in one file, under `key` as a 1-D tensor."""

    kind: str
    name: str
    interval: Interval
    file: str
    key: str


@dataclass(frozen=True, kw_only=True)
class SavedWeight:
    """A tensor of the model as `save_pretrained` names it: its dtype as safetensors spells it ("F32"), and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a `zero/` folder holds.

    Attributes:
        shapes: parameter name → its whole shape.
        kinds: parameter name → kinds of state it has rows of, so that a kind whose rows are lost is missed.
        scalars: parameter name → state name → value that holds for all its elements.
        own_shapes: parameter name → kind → shape, for kinds that have not one value an element of the parameter. Their rows
            count the state tensor's own elements.
        optimizers: for each optimizer its class, and its groups: settings and parameter names.
        files: every file of the checkpoint but the manifest, by name relative to the folder above the manifest's; where hosts
            have disks of their own, those of this one.
        weights: the model's tensors where they lie in rows (layout `sharded`); {} where the folder has weights files.
        is_kept: rotation leaves this checkpoint alone.
        base: checksum of the frozen parameters that the checkpoint's adapters belong to; None where the model is whole.
    """

    world_size: int
    stage: int
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, tuple[str, ...]]
    rows: tuple[SavedRow, ...]
    scalars: dict[str, dict[str, Any]]
    optimizers: tuple[dict[str, Any], ...]
    own_shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    weights: dict[str, SavedWeight] = field(default_factory=dict)
    is_kept: bool = False
    base: str | None = None

    def with_files(self, files: Mapping[str, FileRecord]) -> "Manifest":
        """The same manifest, vouching for these files."""
        return dataclasses.replace(self, files=dict(files))

    def write(self, folder: Path) -> None:
        """Writes `manifest.json` under a temporary name and renames it: it is there whole or not at all.

        It carries the hash of its own content, so that a change in it is seen too.
        """
        content = {
            "format_version": FORMAT_VERSION,
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
            "rows": [[r.kind, r.name, *r.interval, r.file, r.key] for r in self.rows],
            "weights": {name: [weight.dtype, list(weight.shape)] for name, weight in self.weights.items()},
            "is_kept": self.is_kept,
            "base": self.base,
            "files": {name: [record.size, "".join(record.xxh3)] for name, record in self.files.items()},
        }
        temporary = folder / f".{MANIFEST_NAME}.tmp"
        temporary.write_text(_text({**content, "xxh3": _hash(content)}), encoding="utf-8")
        sync(temporary)
        temporary.replace(folder / MANIFEST_NAME)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises `CheckpointError` when there is none, or one that this version cannot read."""
        path = folder / MANIFEST_NAME
        if not path.is_file():
            found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
            raise CheckpointError(
                f"hf_zero: {folder} holds no {MANIFEST_NAME}, so it is no finished hf_zero checkpoint "
                f"({'the folder does not exist' if found is None else f'found: {found[:8]}'}). Resume from a checkpoint "
                "folder that this package has written, or start without resume_from_checkpoint."
            )
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text)
            version = content["format_version"]
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"hf_zero: {path} has format version {version}, and this version of hf_zero reads {FORMAT_VERSION}."
                )
            # The text too: `1E-8` is `1e-8` with one bit flipped.
            if text != _text(content) or content.pop("xxh3") != _hash(content):
                raise CheckpointError(
                    f"hf_zero: {path} is damaged (its own checksum does not fit); resume from an earlier checkpoint."
                )
            return cls(
                world_size=content["world_size"],
                stage=content["stage"],
                shapes={name: tuple(shape) for name, shape in content["shapes"].items()},
                kinds={name: tuple(kinds) for name, kinds in content["kinds"].items()},
                rows=tuple(_row(folder, *row) for row in content["rows"]),
                scalars=content["scalars"],
                optimizers=tuple(content["optimizers"]),
                own_shapes={
                    name: {kind: tuple(shape) for kind, shape in shapes.items()}
                    for name, shapes in content["own_shapes"].items()
                },
                versions=content["versions"],
                weights={name: SavedWeight(dtype=d, shape=tuple(s)) for name, (d, s) in content["weights"].items()},
                is_kept=content["is_kept"],
                base=content["base"],
                files={name: _record(folder, name, *record) for name, record in content["files"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"hf_zero: {path} is damaged ({error!r}); resume from an earlier checkpoint."
            ) from error


def _row(folder: Path, kind: str, name: str, start: int, stop: int, file: str, key: str) -> SavedRow:
    if Path(file).name != file or not is_inside(file):
        raise CheckpointError(f"hf_zero: {folder / MANIFEST_NAME} names {file!r}, which is not a file of that folder.")
    return SavedRow(kind=kind, name=name, interval=Interval(start, stop), file=file, key=key)


def _record(folder: Path, name: str, size: int, xxh3: str) -> FileRecord:
    if not is_inside(name):
        raise CheckpointError(f"hf_zero: {folder / MANIFEST_NAME} names {name!r}, which is not inside its checkpoint.")
    if len(xxh3) != HASH_DIGITS * chunks_in(size):
        raise CheckpointError(
            f"hf_zero: {folder / MANIFEST_NAME} has {len(xxh3)} digits of checksums for {name!r} of {size} bytes."
        )
    return FileRecord(size=size, xxh3=tuple(xxh3[at : at + HASH_DIGITS] for at in range(0, len(xxh3), HASH_DIGITS)))


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1)


def _hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
