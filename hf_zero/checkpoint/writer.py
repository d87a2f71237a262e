"""Writes masters and optimizer state: every rank its rows, in a file of its own."""

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..comm.all_or_none import Exchange
from ..layout.boxes import Box
from ..layout.slots import Interval
from .commit import on_all_ranks
from .files import CheckpointError
from .manifest import MANIFEST_NAME, WEIGHTS, Manifest, SavedRow
from .pieces import LivePieces, Piece, Values, dtype_name, lay_out, write_all

Row = tuple[str, str, Interval, Values]
"""Kind, name, interval of the parameter, and the 1-D tensor of those elements."""

_LIBRARIES = ("hf-zero", "torch", "transformers", "accelerate", "safetensors")


_THEN = (
    "The checkpoint is not complete and will not be resumed from; training state is unharmed. Free space or make the folder "
    "writable."
)


def row_file(rank: int, world_size: int) -> str:
    """Names the file of a rank's rows."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def plan_rows(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    stage: int,
    rows: Sequence[Row],
    shapes: dict[str, tuple[int, ...]],
    scalars: dict[str, dict[str, Any]],
    optimizers: Callable[[], Sequence[dict[str, Any]]],
    exchange: Exchange,
    own_shapes: dict[str, dict[str, tuple[int, ...]]] | None = None,
    boxes: Mapping[str, Box] | None = None,
) -> tuple[Manifest, list[Piece]]:
    """Makes this rank's file; returns the manifest of all ranks' rows and this rank's pieces. Collective.

    Args:
        shapes, scalars: of the parameters that this rank has rows of.
        optimizers: asked for JSON values, the same on every rank, or raises for what cannot be saved.
        exchange: how the ranks tell each other that they are done.
        own_shapes: name → kind → shape, of this rank's rows whose state tensor has not the parameter's shape.
        boxes: name → which part of a parameter this rank's rows count the elements of, where that is not all of it.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed. No manifest is there then.
    """
    file = row_file(rank, world_size)

    def lay_out_own() -> dict[str, Any]:
        # Inside: an optimizer that cannot be saved fails on all ranks together.
        described.extend(optimizers())
        folder.mkdir(parents=True, exist_ok=True)
        # An older manifest must not vouch for the files that are about to replace its own.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        # The file has its full size before values are copied: a full disk shows while training state is untouched.
        begins = lay_out(
            folder / file, {f"{kind}/{name}": (tensor.dtype, tensor.shape) for kind, name, _, tensor in rows}
        )
        pieces.extend(
            Piece(path=folder / file, offset=begins[f"{kind}/{name}"], values=tensor) for kind, name, _, tensor in rows
        )
        places = [
            (kind, name, tuple(interval), file, f"{kind}/{name}", dtype_name(name, tensor.dtype))
            for kind, name, interval, tensor in rows
        ]
        return {"shapes": shapes, "scalars": _plain(scalars), "rows": places, "own_shapes": own_shapes or {}} | {
            "file": file,
            "boxes": {name: box for name, box in (boxes or {}).items() if any(name == row[1] for row in rows)},
        }

    pieces: list[Piece] = []
    described: list[dict[str, Any]] = []
    reports = on_all_ranks(exchange, lay_out_own, doing=f"write to {folder}", then=_THEN)
    return _manifest(reports, world_size, stage, described), pieces


def write_pieces(
    pieces: Sequence[Piece], folder: Path, exchange: Exchange, on_written: Callable[[int], None] = lambda _: None
) -> None:
    """Writes this rank's pieces. Collective.

    Args:
        on_written: is told the bytes of each part that has been written.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed.
    """
    on_all_ranks(exchange, lambda: write_all(pieces, on_written), doing=f"write to {folder}", then=_THEN)


def write_live(pieces: LivePieces, folder: Path, exchange: Exchange) -> None:
    """Writes pieces whose values are about to change. Collective."""
    on_all_ranks(exchange, pieces.write, doing=f"write to {folder}", then=_THEN)


def _manifest(
    reports: Sequence[dict[str, Any]], world_size: int, stage: int, optimizers: Sequence[dict[str, Any]]
) -> Manifest:
    shapes: dict[str, tuple[int, ...]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    own_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    rows: list[SavedRow] = []
    boxes = {report["file"]: report["boxes"] for report in reports if report["boxes"]}
    kinds: dict[str, dict[str, None]] = {}
    for report in reports:
        shapes.update(report["shapes"])
        scalars.update(report["scalars"])
        own_shapes.update(report["own_shapes"])
        rows.extend(
            SavedRow(kind=kind, name=name, interval=Interval(*interval), file=file, key=key, dtype=dtype)
            for kind, name, interval, file, key, dtype in report["rows"]
        )
    for row in rows:
        if row.kind != WEIGHTS:
            kinds.setdefault(row.name, {})[row.kind] = None
    return Manifest(
        world_size=world_size,
        stage=stage,
        shapes=shapes,
        kinds={name: tuple(found) for name, found in kinds.items()},
        rows=tuple(rows),
        scalars=scalars,
        optimizers=tuple(optimizers),
        own_shapes=own_shapes,
        versions=dict(_versions()),
        boxes=boxes,
    )


@cache
def _versions() -> Mapping[str, str]:
    """Returns the versions of the libraries; cached, since that takes 20 ms of every save."""
    return {library: importlib.metadata.version(library) for library in _LIBRARIES}


def _plain(scalars: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """0-d tensors as {"dtype", "value"}; numbers, strings, booleans and None as they are."""
    plain: dict[str, dict[str, Any]] = {}
    numbers = _numbers_of(value for values in scalars.values() for value in values.values())
    for name, values in scalars.items():
        plain[name] = {}
        for key, value in values.items():
            if torch.is_tensor(value) and not value.is_complex():
                if value.numel() != 1:
                    raise CheckpointError(
                        f"hf_zero: the optimizer keeps {key!r} of {name!r} with {value.numel()} elements, neither "
                        "one nor one an element of this rank's part, so it cannot be saved. Set `stage: 0`, where a "
                        "rank has whole parameters."
                    )
                value = {"dtype": str(value.dtype).removeprefix("torch."), "value": numbers[id(value)]}
            elif not isinstance(value, int | float | str | None):
                raise CheckpointError(
                    f"hf_zero: the optimizer keeps {key!r} of {name!r} as a {_kind_of(value)}, and only tensors, numbers "
                    "and strings can be saved. Use another optimizer, or train without checkpoints."
                )
            plain[name][key] = value
    return plain


def _kind_of(value: Any) -> str:
    return f"number of {value.dtype}" if torch.is_tensor(value) else type(value).__name__


def _numbers_of(values: Iterable[Any]) -> dict[int, int | float | bool]:
    """Reads tensors of one element: id → number. An accelerator's are read with one wait a dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for value in values:
        if torch.is_tensor(value) and value.numel() == 1 and not value.is_complex():
            alike.setdefault((value.device, value.dtype), []).append(value)
    numbers: dict[int, int | float | bool] = {}
    for found in alike.values():
        # One copy and one wait for all: an `item()` each would stop the device once a parameter.
        together = torch.stack([value.detach().reshape(()) for value in found]).tolist()
        numbers.update(zip(map(id, found), together))
    return numbers
