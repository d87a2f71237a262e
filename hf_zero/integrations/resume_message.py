"""The message of a resumed run: folder, step and origin."""

import json
import sys
from pathlib import Path

from ..checkpoint.faults import shown
from ..checkpoint.manifest import Manifest
from ..checkpoint.run_log import STATE_NAME
from ..engine.engine import ZeroEngine
from .state_io import ZERO_FOLDER, steps_of


def say_resumed(engine: ZeroEngine, folder: str | Path, origin: str | None = None) -> None:
    """Prints the message to stderr, on rank 0 only.

    Args:
        engine: the engine.
        folder: the checkpoint's folder.
        origin: the checkpoint's writer, such as "plain Trainer"; None for hf_zero.
    """
    if engine.world_groups.rank != 0:
        return
    manifest = Manifest.read(Path(folder) / ZERO_FOLDER) if origin is None else None
    if manifest is not None:
        origin = _by(manifest.world_size, manifest.stage)
    here = _by(engine.world_groups.world_size, engine.config.stage)
    at = _progress(Path(folder), manifest)
    print(
        f"hf_zero: resumed from {folder}{at}, saved by {origin}; continuing with {here}.", file=sys.stderr, flush=True
    )


def _by(ranks: int, stage: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''} at stage {stage}"


def _progress(folder: Path, manifest: Manifest | None) -> str:
    """Returns Trainer's step, or the optimizer's step count, if there is one."""
    if (folder / STATE_NAME).is_file():
        return f" at step {shown(json.loads((folder / STATE_NAME).read_text(encoding='utf-8'))['global_step'])}"
    steps = 0 if manifest is None else steps_of(folder)
    return f" after {steps} optimizer steps" if steps else ""
