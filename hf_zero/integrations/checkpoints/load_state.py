"""Masters and optimizer state into an engine, from a checkpoint of whichever format."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.folder.on_all_ranks import on_all_ranks
from ...checkpoint.format.manifest import CheckpointError
from ...checkpoint.format.settings import restore_settings
from ...engine.engine import ZeroEngine
from ...engine.engine_state import EngineState, KindsOf, Read
from ...engine.units.split_model import read_part
from ...layout.boxes import Box
from ...layout.intervals import Interval
from ...optimizer.state.state_kinds import state_names
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


def refuse_other_state(
    path: Path, optimizer: torch.optim.Optimizer, group: dict[str, Any], settings: dict[str, Any], found: Iterable[str]
) -> None:
    """Raises `CheckpointError` where the state that a file has of a matrix is of another optimizer: files name no class.

    Args:
        group, settings: of the run's optimizer, and those of the file that it takes.
        found: names of the state; none where it was saved before the first step.
    """
    there = set(found)
    missing = state_names(optimizer, group | settings) - there
    if there and missing:
        raise CheckpointError(
            f"hf_zero: {path} has {', '.join(sorted(there))} as state of a parameter, and {type(optimizer).__name__} needs "
            f"{min(missing)!r}. Resume with the optimizer that it was made with, or start afresh from the saved model."
        )


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
        engine.world.exchange,
        lambda: _load_own(engine, path, opens),
        doing=f"read {path}",
        then="Nothing was trained; resume from another checkpoint.",
    )[0]


def _load_own(engine: ZeroEngine, path: Path, opens: Opens) -> str | None:
    with opens(path, engine.state) as saved:
        for group, settings in saved.settings:
            restore_settings(group, settings)
        with progress_bar("reading optimizer state", is_main=engine.world_groups.rank == 0) as show:
            boxes, dtypes = engine.state.boxes(), engine.state.master_dtypes()

            def read(kind: str, name: str, interval: Interval) -> torch.Tensor:
                box = boxes.get(name)
                values = saved.read(kind, name, interval) if box is None else saved.part(kind, name, box, interval)
                show(values.nbytes)
                # As torch's own `load_state_dict` has it: state in the dtype that is stepped.
                is_alike = saved.origin is None or not values.is_floating_point()
                return values if is_alike else values.to(dtypes[name])

            engine.state.fill(read, saved.kinds_of, saved.scalars_of)
        return saved.origin
