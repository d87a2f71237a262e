"""An engine's state, written as a checkpoint of its own."""

from pathlib import Path

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import ZERO_FOLDER, seal_state, write_state


def save_engine(engine: ZeroEngine, root: str | Path) -> None:
    seal_state(engine, Path(root), write_state(engine, Path(root) / ZERO_FOLDER))
