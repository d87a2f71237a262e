"""The line that says what a run goes on from: which folder, at which step, and who saved it."""

import json
import sys
from pathlib import Path

from ...checkpoint.format.manifest import Manifest
from ...engine.engine import ZeroEngine
from ..checkpoints.checkpointing import ZERO_FOLDER

_TRAINER_STATE = "trainer_state.json"


def say_resumed(engine: ZeroEngine, folder: str | Path, origin: str | None = None) -> None:
    """Prints the line to stderr, on rank 0 only.

    Args:
        origin: who saved the folder, such as "plain Trainer"; None where one of our engines did.
    """
    if engine.world_groups.rank != 0:
        return
    manifest = Manifest.read(Path(folder) / ZERO_FOLDER) if origin is None else None
    if manifest is not None:
        origin = _by(manifest.world_size, manifest.stage)
    here = _by(engine.world_groups.world_size, engine.config.stage)
    at = _progress(Path(folder), manifest)
    print(f"hf_zero: resumed from {folder}{at}, saved by {origin}; going on with {here}.", file=sys.stderr, flush=True)


def _by(ranks: int, stage: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''} at stage {stage}"


def _progress(folder: Path, manifest: Manifest | None) -> str:
    """Trainer's step, or how often the optimizer has stepped, where it counts."""
    if (folder / _TRAINER_STATE).is_file():
        return f" at step {json.loads((folder / _TRAINER_STATE).read_text(encoding='utf-8'))['global_step']}"
    counts = [scalars["step"] for scalars in manifest.scalars.values() if "step" in scalars] if manifest else []
    steps = max((count["value"] if isinstance(count, dict) else count for count in counts), default=None)
    return "" if steps is None else f" after {steps:.0f} optimizer steps"
