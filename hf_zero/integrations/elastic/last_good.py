"""Which state an accelerate loop goes on from after a restart: the newest that is good."""

import re
from pathlib import Path

from accelerate import Accelerator
from accelerate.logging import get_logger

from ...checkpoint.format.manifest import CheckpointError, Manifest
from ...checkpoint.format.text import shown
from ...checkpoint.verify import checkpoint_faults
from ..checkpoints.checkpointing import ZERO_FOLDER
from .exchange import exchange_between_ranks

logger = get_logger(__name__)

_NUMBERED = re.compile(r"^(?!\.).*[-_](\d+)$")


def last_good_state(accelerator: Accelerator, folder: str | Path | None = None) -> str | None:
    """The newest state in `folder` that is whole and undamaged, for `load_state`; None where there is none yet. Collective.

    Newest is the highest number at the end of a name, such as `step_100` or accelerate's `checkpoint_3`. With accelerate's
    automatic naming, the next save has a number of its own.

    Args:
        folder: in which `save_state` has made folders; by default that of automatic naming, `project_dir/checkpoints`.

    Raises:
        ValueError: on every rank: there are states and none is good, each with its faults; or no folder is known.
    """
    naming = accelerator.project_configuration
    if folder is None and accelerator.project_dir is None:
        raise ValueError(
            "hf_zero: last_good_state was called without a folder, and the Accelerator has no project_dir. Give the folder that "
            "save_state makes its folders in."
        )
    parent = Path(accelerator.project_dir, "checkpoints") if folder is None else Path(folder).expanduser()
    names = {path.name for path in parent.glob("*") if path.is_dir() and _NUMBERED.match(path.name)}
    everyones = {name for theirs in exchange_between_ranks(names) for name in theirs}
    newest_first = sorted(everyones, key=_number, reverse=True)
    if folder is None and naming.automatic_checkpoint_naming:
        # A damaged one keeps its number, too: its name is not free.
        naming.iteration = max((_number(name) + 1 for name in newest_first), default=0)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    passed: list[str] = []
    for path in (parent / name for name in newest_first):
        reports = exchange_between_ranks(_faults(path, rank=rank, world_size=world_size))
        faults = list(dict.fromkeys(fault for theirs in reports for fault in theirs))
        if not faults:
            if passed:
                logger.warning(
                    f"hf_zero: going on from {path}. Passed over: {'; '.join(passed)}", main_process_only=True
                )
            return str(path)
        passed.append(f"{path.name}: {shown(', '.join(faults[:3]), 2000)}")
    if passed:
        raise ValueError(
            f"hf_zero: no state in {parent} is good: {'; '.join(passed)}. Nothing was trained: mend or move them, or give the "
            "run another folder."
        )
    return None


def warn_of_scaled_schedule(accelerator: Accelerator, folder: Path) -> None:
    """Names a trap of accelerate, which steps a schedule once for each process: on other ranks, a saved one is elsewhere."""
    saved, now = _ranks_of(folder), accelerator.num_processes
    scaled = [s for s in accelerator._schedulers if s.step_with_optimizer and not s.split_batches]
    if saved not in (None, now) and scaled:
        logger.warning(
            f"hf_zero: accelerate has stepped the learning rate's schedule {saved} times a step, once for each process, and now "
            f"does {now} times: it goes on at another place of the schedule than it had come to. Make the Accelerator with "
            "step_scheduler_with_optimizer=False, and call scheduler.step() where accelerator.sync_gradients.",
            main_process_only=True,
        )


def _ranks_of(folder: Path) -> int | None:
    try:
        return Manifest.read(folder / ZERO_FOLDER).world_size
    except CheckpointError:
        return None


def _number(name: str) -> int:
    found = _NUMBERED.match(name)
    return int(found[1]) if found else -1


def _faults(path: Path, *, rank: int, world_size: int) -> list[str]:
    if path.is_dir() and not (path / ZERO_FOLDER).is_dir():
        return [f"it has no {ZERO_FOLDER}/ folder"]
    return checkpoint_faults(path, ZERO_FOLDER, rank=rank, world_size=world_size)
