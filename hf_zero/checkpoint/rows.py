"""A rank's rows of masters and optimizer state, in one file per rank."""

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..comm.all_or_none import Merge
from ..layout.boxes import Box
from ..layout.intervals import Cuts, EvenCuts, Interval, joined_cuts, joined_intervals, without_ranks
from ..versions import __version__
from .faults import CheckpointError
from .hashes import Written
from .live_pieces import LivePieces, Piece, dtype_name, lay_out, write_all
from .manifest import MANIFEST_NAME, STACKS, WEIGHTS, Manifest, SavedRows, row_file
from .on_all_ranks import done_on_all_ranks, merged_on_all_ranks
from .safetensors_headers import SAVE_KEY
from .staging import Values

Row = tuple[str, str, Interval, Values]
"""Kind of state, parameter name, interval of the parameter's elements, and the 1-D tensor of those elements."""


_LIBRARIES = ("torch", "transformers", "accelerate", "safetensors")


_THEN = (
    "The checkpoint is incomplete, so no run resumes from it; the training state is unchanged. Free space or make the folder "
    "writable."
)


Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class RowsOfRanks:
    """Describes the rows of some ranks, in as few `EvenCuts` as their shards allow.

    The ranks merge these in rounds until each has the rows of all ranks. Shards have equal sizes, so neither a message nor its
    parsing grows with the number of ranks times the number of buckets.

    Attributes:
        ranks: intervals of the ranks in this.
        shapes: parameter name → whole shape.
        scalars: parameter name → state that is one value for all elements.
        own_shapes: parameter name → kind → shape, of state tensors of another shape than the parameter's.
        rows: (parameter name, its kinds and their dtypes, box) → the cuts of its rows and their ranks.
    """

    ranks: tuple[Interval, ...]
    shapes: dict[str, tuple[int, ...]]
    scalars: dict[str, dict[str, Any]]
    own_shapes: dict[str, dict[str, tuple[int, ...]]]
    rows: "dict[tuple[str, tuple[tuple[str, str], ...], Box | None], list[Cuts]]"

    @classmethod
    def of_rank(
        cls,
        rank: int,
        rows: Iterable[Row],
        *,
        shapes: dict[str, tuple[int, ...]],
        scalars: dict[str, dict[str, Any]],
        own_shapes: dict[str, dict[str, tuple[int, ...]]],
        boxes: Mapping[str, Box],
    ) -> "RowsOfRanks":
        """Describes the rows of one rank. Arguments as of `plan_rows`."""
        # Group the kinds by interval, because most kinds of a parameter's state are cut at the same elements.
        parts: dict[tuple[str, Interval, int], list[tuple[str, str]]] = {}
        for kind, name, interval, tensor in rows:
            count = own_shapes[name][kind][0] if kind in STACKS else 0
            parts.setdefault((name, interval, count), []).append((kind, dtype_name(name, tensor.dtype)))
        found: dict[tuple[str, tuple[tuple[str, str], ...], Box | None], list[Cuts]] = {}
        for (name, (start, stop), count), kinds in parts.items():
            cuts = EvenCuts(start, stop, 0, stop), range(rank, rank + 1)
            box = boxes.get(name)
            found.setdefault((name, tuple(kinds), box.stacked(count) if box and count else box), []).append(cuts)
        return cls(ranks=(Interval(rank, rank + 1),), shapes=shapes, scalars=scalars, own_shapes=own_shapes, rows=found)

    def merged(self, other: "RowsOfRanks") -> "RowsOfRanks":
        """Returns the rows of the ranks of both."""
        # In the last round of messages, both may have the rows of a rank.
        is_double = any(mine.intersect(theirs) for mine in self.ranks for theirs in other.ranks)
        rows = dict(self.rows)
        for key, added in other.rows.items():
            if is_double:
                added = [part for each in added for part in without_ranks(*each, self.ranks)]
            rows[key] = joined_cuts([*rows[key], *added]) if key in rows else added
        return RowsOfRanks(
            ranks=tuple(joined_intervals([*self.ranks, *other.ranks])),
            shapes=self.shapes | other.shapes,
            scalars=self.scalars | _of_either(self.scalars, other.scalars),
            # One rank has a factor of rows that no other rank has, and all ranks have a residual of the same parameter.
            own_shapes=self.own_shapes
            | {
                name: (mine := self.own_shapes.get(name, {})) | _of_either(mine, shapes)
                for name, shapes in other.own_shapes.items()
            },
            rows=rows,
        )

    def manifest(self, world_size: int, stage: int, optimizers: Sequence[dict[str, Any]]) -> Manifest:
        """Returns the manifest of these rows, in an order that does not depend on the order of merges."""
        kinds: dict[str, dict[str, None]] = {}
        rows: list[SavedRows] = []
        index = {name: number for number, name in enumerate(self.shapes)}

        def sort_key(key: Any) -> tuple[int, str]:
            return index.get(key[0], len(index)), repr(key)

        for name, of_part, box in sorted(self.rows, key=sort_key):
            kinds.setdefault(name, {}).update((kind, None) for kind, _ in of_part if kind != WEIGHTS)
            for cuts, ranks in self.rows[name, of_part, box]:
                rows.extend(
                    SavedRows(kind=kind, name=name, cuts=cuts, ranks=ranks, dtype=dtype, box=box)
                    for kind, dtype in of_part
                )
        return Manifest(
            world_size=world_size,
            stage=stage,
            shapes=self.shapes,
            kinds={name: tuple(found) for name, found in kinds.items() if found},
            rows=tuple(rows),
            scalars=dict(sorted(self.scalars.items(), key=sort_key)),
            optimizers=tuple(optimizers),
            own_shapes={name: dict(sorted(of.items())) for name, of in sorted(self.own_shapes.items(), key=sort_key)},
            versions=dict(versions_of(*_LIBRARIES)),
        )


def _of_either(mine: Mapping[str, Value], theirs: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the values of both; of two different ones the same one on all ranks, whose manifests must be equal."""
    return {
        name: value if name not in mine or mine[name] == value else min(mine[name], value, key=repr)
        for name, value in theirs.items()
    }


def plan_rows(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    stage: int,
    save: str,
    rows: Sequence[Row],
    shapes: dict[str, tuple[int, ...]],
    scalars: dict[str, dict[str, Any]],
    optimizers: Callable[[], Sequence[dict[str, Any]]],
    merge: Merge,
    own_shapes: dict[str, dict[str, tuple[int, ...]]] | None = None,
    boxes: Mapping[str, Box] | None = None,
) -> tuple[Manifest, list[Piece]]:
    """Makes this rank's file; returns the manifest of all ranks' rows, and this rank's pieces. Collective.

    Args:
        save: ID of the save, the same on every rank.
        shapes, scalars: for the parameters of this rank's rows.
        optimizers: returns JSON values, the same on every rank; raises if an optimizer cannot be saved.
        merge: merges the values of all ranks.
        own_shapes: name → kind → shape, for this rank's state tensors whose shape differs from the parameter's; of `STACKS` the
            shape of the whole stack.
        boxes: name → the box of the parameter whose elements this rank's intervals count, if it is not the whole parameter.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed. There is no manifest then.
    """
    file = row_file(rank, world_size)

    def lay_out_own() -> RowsOfRanks:
        # Called here: if an optimizer cannot be saved, all ranks raise together.
        described.extend(optimizers())
        folder.mkdir(parents=True, exist_ok=True)
        # Remove the older manifest, which must not vouch for the new files.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        # Allocate the full size before values are copied: a full disk then fails before any training state is touched.
        begins = lay_out(
            folder / file,
            {f"{kind}/{name}": (tensor.dtype, tensor.shape) for kind, name, _, tensor in rows},
            # Also in the file: a manifest on another disk has no checksum of this file, which a person may copy there.
            {SAVE_KEY: save},
        )
        pieces.extend(
            Piece(
                path=folder / file,
                offset=begins[f"{kind}/{name}"],
                values=tensor,
                name=name if kind == WEIGHTS else f"{kind} of {name}",
            )
            for kind, name, _, tensor in rows
        )
        return RowsOfRanks.of_rank(
            rank, rows, shapes=shapes, scalars=_plain(scalars), own_shapes=own_shapes or {}, boxes=boxes or {}
        )

    pieces: list[Piece] = []
    described: list[dict[str, Any]] = []
    rows_of_all = merged_on_all_ranks(merge, rank, lay_out_own, doing=f"write to {folder}", then=_THEN)
    return replace(rows_of_all.manifest(world_size, stage, described), save=save), pieces


def write_pieces(
    pieces: Sequence[Piece],
    folder: Path,
    merge: Merge,
    rank: int,
    manifest: Manifest,
    on_written: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Writes this rank's pieces; returns the manifest to seal, with the hashes of the pieces in memory. Collective.

    Args:
        on_written: called with the bytes of each part after it is written.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed.
    """
    written: list[Written] = []

    def write() -> None:
        written.extend(write_all(pieces, on_written))

    done_on_all_ranks(merge, rank, write, doing=f"write to {folder}", then=_THEN)
    return replace(manifest, written=tuple(written))


def write_live(pieces: LivePieces, folder: Path, merge: Merge, rank: int, manifest: Manifest) -> Manifest:
    """Writes pieces whose values are about to change; returns the manifest as `write_pieces` does. Collective."""
    done_on_all_ranks(merge, rank, pieces.write, doing=f"write to {folder}", then=_THEN)
    return replace(manifest, written=tuple(pieces.written))


@cache
def versions_of(*libraries: str) -> Mapping[str, str]:
    """Returns the versions of the package and of libraries. Cached, since the lookup takes 20 ms of every save.

    The package's own version is not looked up: a checkout on PYTHONPATH is not installed, and its first save would fail.
    """
    return {"hf-zero": __version__} | {library: importlib.metadata.version(library) for library in libraries}


def _plain(scalars: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Formats 0-d tensors as {"dtype", "value"}; keeps numbers, strings, booleans and None."""
    plain: dict[str, dict[str, Any]] = {}
    numbers = _numbers_of(value for values in scalars.values() for value in values.values())
    for name, values in scalars.items():
        plain[name] = {}
        for key, value in values.items():
            if torch.is_tensor(value) and not value.is_complex():
                if value.numel() != 1:
                    raise CheckpointError(
                        f"hf_zero: the optimizer keeps {key!r} of {name!r} with {value.numel()} elements, so it cannot be "
                        "saved; allowed: one element, or one for each element of this rank's shard. Set `stage: 0`, which "
                        "keeps parameters whole."
                    )
                value = {"dtype": str(value.dtype).removeprefix("torch."), "value": numbers[id(value)]}
            elif not isinstance(value, int | float | str | None):
                raise CheckpointError(
                    f"hf_zero: the optimizer keeps {key!r} of {name!r} as a {_kind_of(value)}, but only tensors, numbers and "
                    "strings can be saved. Use another optimizer, or train without checkpoints."
                )
            plain[name][key] = value
    return plain


def _kind_of(value: Any) -> str:
    return f"number of {value.dtype}" if torch.is_tensor(value) else type(value).__name__


def _numbers_of(values: Iterable[Any]) -> dict[int, int | float | bool]:
    """Reads tensors of one element: id → number. Waits for an accelerator once per dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for value in values:
        if torch.is_tensor(value) and value.numel() == 1 and not value.is_complex():
            alike.setdefault((value.device, value.dtype), []).append(value)
    numbers: dict[int, int | float | bool] = {}
    for found in alike.values():
        # Copy all with one wait: `item()` for each would make the host wait once per parameter.
        together = torch.stack([value.detach().reshape(()) for value in found]).tolist()
        # Key by id: `scalars` keeps these tensors alive until the numbers are looked up, so ids are unique.
        numbers.update(zip(map(id, found), together))
    return numbers
