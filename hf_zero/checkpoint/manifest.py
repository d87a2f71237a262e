"""The manifest: which element of which parameter's state lies in which file. Written last, it makes a checkpoint whole."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..layout.intervals import Interval

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


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
class Manifest:
    """What a `zero/` folder holds.

    Attributes:
        shapes: parameter name → its whole shape.
        kinds: parameter name → kinds of state it has rows of, so that a kind whose rows are lost is missed.
        scalars: parameter name → state name → value that holds for all its elements.
        optimizers: for each optimizer its class, and its groups: settings and parameter names.
    """

    world_size: int
    stage: int
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, tuple[str, ...]]
    rows: tuple[SavedRow, ...]
    scalars: dict[str, dict[str, Any]]
    optimizers: tuple[dict[str, Any], ...]
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes `manifest.json` under a temporary name and renames it: it is there whole or not at all."""
        text = json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "world_size": self.world_size,
                "stage": self.stage,
                "versions": self.versions,
                "optimizers": list(self.optimizers),
                "shapes": {name: list(shape) for name, shape in self.shapes.items()},
                "kinds": {name: list(kinds) for name, kinds in self.kinds.items()},
                "scalars": self.scalars,
                "rows": [[r.kind, r.name, *r.interval, r.file, r.key] for r in self.rows],
            },
            indent=1,
        )
        temporary = folder / f".{MANIFEST_NAME}.tmp"
        temporary.write_text(text, encoding="utf-8")
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
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"hf_zero: {path} has format version {version}, and this version of hf_zero reads {FORMAT_VERSION}."
                )
            return cls(
                world_size=content["world_size"],
                stage=content["stage"],
                shapes={name: tuple(shape) for name, shape in content["shapes"].items()},
                kinds={name: tuple(kinds) for name, kinds in content["kinds"].items()},
                rows=tuple(_row(folder, *row) for row in content["rows"]),
                scalars=content["scalars"],
                optimizers=tuple(content["optimizers"]),
                versions=content["versions"],
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"hf_zero: {path} is damaged ({error!r}); resume from an earlier checkpoint."
            ) from error


def _row(folder: Path, kind: str, name: str, start: int, stop: int, file: str, key: str) -> SavedRow:
    if Path(file).name != file:
        raise CheckpointError(f"hf_zero: {folder / MANIFEST_NAME} names {file!r}, which is not a file of that folder.")
    return SavedRow(kind=kind, name=name, interval=Interval(start, stop), file=file, key=key)
