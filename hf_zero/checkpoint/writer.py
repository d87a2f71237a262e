"""Writing a checkpoint: every rank its rows, then rank 0 the manifest."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..layout.intervals import Interval
from .manifest import MANIFEST_NAME, CheckpointError, Manifest, SavedRow
from .together import Exchange, together

_LIBRARIES = ("hf-zero", "torch", "transformers", "accelerate", "safetensors")


def write_rows(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    stage: int,
    rows: Sequence[tuple[str, str, Interval, torch.Tensor]],
    shapes: dict[str, tuple[int, ...]],
    scalars: dict[str, dict[str, Any]],
    optimizers: Sequence[dict[str, Any]],
    exchange: Exchange,
) -> Manifest:
    """Writes this rank's rows; returns the manifest of all ranks', which is still to be written. Collective.

    Args:
        rows: (kind, name, interval of the parameter, 1-D tensor of those elements).
        shapes, scalars: of the parameters that this rank has rows of.
        optimizers: the same on every rank; JSON values.
        exchange: how the ranks tell each other that they are done.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed. No manifest is there then.
    """
    file = f"rank-{rank:05d}-of-{world_size:05d}.safetensors"

    def write_own() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        # An older manifest must not vouch for the files that are about to replace its own.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        tensors = {f"{kind}/{name}": tensor.detach().cpu().contiguous() for kind, name, _, tensor in rows}
        temporary = folder / f".{file}.tmp"
        save_file(tensors, temporary)
        temporary.replace(folder / file)
        places = [(kind, name, tuple(interval), file, f"{kind}/{name}") for kind, name, interval, _ in rows]
        return {"shapes": shapes, "scalars": _plain(scalars), "rows": places}

    then = (
        "The checkpoint is not complete and will not be resumed from; training state is unharmed. Free space or make the folder "
        "writable."
    )
    reports = together(exchange, write_own, doing=f"write to {folder}", then=then)
    return _manifest(reports, world_size, stage, optimizers)


def _manifest(
    reports: Sequence[dict[str, Any]], world_size: int, stage: int, optimizers: Sequence[dict[str, Any]]
) -> Manifest:
    shapes: dict[str, tuple[int, ...]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    rows: list[SavedRow] = []
    kinds: dict[str, dict[str, None]] = {}
    for report in reports:
        shapes.update(report["shapes"])
        scalars.update(report["scalars"])
        rows.extend(
            SavedRow(kind=kind, name=name, interval=Interval(*interval), file=file, key=key)
            for kind, name, interval, file, key in report["rows"]
        )
    for row in rows:
        kinds.setdefault(row.name, {})[row.kind] = None
    versions = {library: importlib.metadata.version(library) for library in _LIBRARIES}
    return Manifest(
        world_size=world_size,
        stage=stage,
        shapes=shapes,
        kinds={name: tuple(found) for name, found in kinds.items()},
        rows=tuple(rows),
        scalars=scalars,
        optimizers=tuple(optimizers),
        versions=versions,
    )


def _plain(scalars: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """0-d tensors as {"dtype", "value"}; numbers, strings, booleans and None as they are."""
    plain: dict[str, dict[str, Any]] = {}
    for name, values in scalars.items():
        plain[name] = {}
        for key, value in values.items():
            if torch.is_tensor(value):
                if value.numel() != 1:
                    raise CheckpointError(
                        f"hf_zero: the optimizer keeps {key!r} of {name!r} with {value.numel()} elements, neither one nor one "
                        "an element of the parameter, so it cannot be saved by interval. Use another optimizer."
                    )
                value = {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
            plain[name][key] = value
    return plain
