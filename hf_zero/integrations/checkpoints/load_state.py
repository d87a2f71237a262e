"""Masters and optimizer state into an engine, from a checkpoint of whichever format."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.folder.on_all_ranks import on_all_ranks
from ...checkpoint.format.settings import restore_settings
from ...engine.engine import ZeroEngine
from ...engine.engine_state import EngineState, KindsOf, Read
from ...engine.units.split_model import read_part
from ...layout.boxes import Box
from ...layout.intervals import Interval
from .progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class SavedOptimizers:
    """Masters and optimizer state of a checkpoint that fits the run, whose files are open.

    Attributes:
        settings: groups of the run's optimizers, each with the settings that were saved of it.
        read: the elements of an interval of one kind of state of a parameter, a 1-D host tensor of its own memory.
        read_part: the same of a part of the parameter, where it is not read run by run with `read`.
        kinds_of: the kinds of state of a parameter that have one value an element.
        scalars_of: a parameter's state that holds for it as a whole (`step`).
        origin: who wrote it, in words; None is hf_zero.
    """

    settings: list[tuple[dict[str, Any], dict[str, Any]]]
    read: Read
    kinds_of: KindsOf
    scalars_of: Callable[[str], dict[str, Any]]
    origin: str | None = None
    read_part: Callable[[str, str, Box, Interval], torch.Tensor] | None = None

    def part(self, kind: str, name: str, box: Box, interval: Interval) -> torch.Tensor:
        """The elements `interval` of a part of one kind of state of a parameter."""
        if self.read_part is not None:
            return self.read_part(kind, name, box, interval)
        return read_part(box, interval, partial(self.read, kind, name))


Opens = Callable[[Path, EngineState], AbstractContextManager[SavedOptimizers]]
"""Opens a checkpoint of one format for this rank. Raises `CheckpointError` where it is damaged or does not fit the run."""


def load_state(engine: ZeroEngine, path: Path, opens: Opens) -> str | None:
    """Replaces masters, optimizer state and the settings of groups by saved ones; returns their `origin`. Collective.

    The parameters themselves are loaded beforehand. Every rank reads the bytes of its own rows, whatever world size and stage
    wrote them.

    Raises:
        CheckpointError: on every rank: not finished, damaged, or of another model or optimizer.
    """
    return on_all_ranks(
        engine.everyone.exchange,
        lambda: _load_own(engine, path, opens),
        doing=f"read {path}",
        then="Nothing was trained; resume from another checkpoint.",
    )[0]


def _load_own(engine: ZeroEngine, path: Path, opens: Opens) -> str | None:
    with opens(path, engine.state) as saved:
        for group, settings in saved.settings:
            restore_settings(group, settings)
        with progress_bar("reading optimizer state", is_main=engine.run.rank == 0) as show:
            boxes = engine.state.boxes()

            def read(kind: str, name: str, interval: Interval) -> torch.Tensor:
                box = boxes.get(name)
                values = saved.read(kind, name, interval) if box is None else saved.part(kind, name, box, interval)
                show(values.nbytes)
                return values

            engine.state.fill(read, saved.kinds_of, saved.scalars_of)
        return saved.origin
