"""An engine's state into a checkpoint folder and back."""

from pathlib import Path
from typing import Any

from ..checkpoint.manifest import CheckpointError
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.settings import plain_settings, restore_settings, same_groups
from ..checkpoint.together import together
from ..checkpoint.writer import write_rows
from ..engine.engine import ZeroEngine

ZERO_FOLDER = "zero"


def save_engine(engine: ZeroEngine, folder: str | Path) -> None:
    """Writes masters and optimizer state to `folder`, every rank its own rows. Collective."""
    groups = engine.groups
    # Ranks of a replicate group hold the same rows; the first of them writes.
    writes = groups.rank == groups.shard_rank
    rows = list(engine.state_rows()) if writes else []
    write_rows(
        Path(folder),
        rank=groups.rank,
        world_size=groups.world_size,
        stage=engine.config.stage,
        rows=[(row.kind, row.name, row.interval, row.tensor) for row in rows],
        shapes=engine.parameter_shapes(),
        scalars=engine.state_scalars() if writes else {},
        optimizers=[
            {
                "class": type(optimizer).__name__,
                "groups": [
                    {"settings": plain_settings(group), "parameters": list(names)}
                    for group, names in zip(optimizer.param_groups, group_names)
                ],
            }
            for optimizer, group_names in engine.named_groups()
        ],
        exchange=engine.transport.exchange,
    )


def load_engine(engine: ZeroEngine, folder: str | Path) -> None:
    """Replaces masters and optimizer state by those in `folder`, whatever world size and stage wrote them.

    The parameters themselves are loaded beforehand, by Trainer or accelerate. Every rank reads its own bytes.

    Raises:
        CheckpointError: not a finished checkpoint, damaged, or of another model or optimizer.
    """
    together(
        engine.transport.exchange,
        lambda: _load_own(engine, Path(folder)),
        doing=f"read {folder}",
        then="Nothing was trained; resume from another checkpoint.",
    )


def _load_own(engine: ZeroEngine, folder: Path) -> None:
    with CheckpointReader(folder) as reader:
        reader.check_names(engine.parameter_shapes())
        for (optimizer, names), saved in zip(engine.named_groups(), _saved_optimizers(engine, reader, folder)):
            if not same_groups(saved["groups"], names):
                raise CheckpointError(
                    f"hf_zero: {folder}: the parameter groups of {saved['class']} hold other parameters than the "
                    "optimizer's now. Resume with the weight-decay and group settings that the checkpoint was made with."
                )
            for group, saved_group in zip(optimizer.param_groups, saved["groups"]):
                restore_settings(group, saved_group["settings"])
        engine.fill_state(reader.read, reader.kinds_of, reader.scalars_of)


def _saved_optimizers(engine: ZeroEngine, reader: CheckpointReader, folder: Path) -> tuple[dict[str, Any], ...]:
    saved = reader.manifest.optimizers
    there = [optimizer["class"] for optimizer in saved]
    here = [type(optimizer).__name__ for optimizer, _ in engine.named_groups()]
    if there != here:
        raise CheckpointError(
            f"hf_zero: {folder} was made with the optimizer {', '.join(there) or 'none'}, and this run has "
            f"{', '.join(here) or 'none'}. Resume with the same optimizer, or start afresh from the saved model."
        )
    return saved
