"""The state from which an accelerate loop resumes after a restart: the newest good one."""

import re
from pathlib import Path

from accelerate import Accelerator
from accelerate.logging import get_logger

from ..checkpoint.commit import put_back
from ..checkpoint.faults import CheckpointError, shown
from ..checkpoint.manifest import Manifest
from ..checkpoint.verify import Findings, agreed, findings_in
from ..comm.all_or_none import exchange_between_ranks
from .state_io import ZERO_FOLDER

logger = get_logger(__name__)


# No leading dot: names of unfinished and replaced saves (`.tmp-step_100`, `.old-step_100`) also end with a number.
_NUMBERED = re.compile(r"^(?!\.).*[-_](\d+)$")


def last_good_state(accelerator: Accelerator, folder: str | Path | None = None) -> str | None:
    """Returns the newest complete and undamaged state in `folder`, for `load_state`; None if there is no state. Collective.

    The newest state has the highest number at the end of its name, such as `step_100` or accelerate's `checkpoint_3`. With
    accelerate's automatic naming, the next save gets a new number.

    Args:
        accelerator: the Accelerator.
        folder: the folder containing the folders of `save_state`; by default `project_dir/checkpoints`, as in automatic
            naming.

    Raises:
        ValueError: on every rank, if there are states but none is good (lists each one's faults), or if no folder is known.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"hf_zero: last_good_state got {shown(accelerator)}. It takes the Accelerator, and then the folder: "
            "last_good_state(accelerator, folder)."
        )
    naming = accelerator.project_configuration
    if folder is None and accelerator.project_dir is None:
        raise ValueError(
            "hf_zero: last_good_state was called without a folder, and the Accelerator has no project_dir. Pass the folder in "
            "which save_state creates its folders."
        )
    parent = Path(accelerator.project_dir, "checkpoints") if folder is None else Path(folder).expanduser()
    # An interrupted save may have renamed the state it was replacing, for example one of the same step.
    replaced = [old.name.removeprefix(".old-") for old in parent.glob(".old-*") if (old / ZERO_FOLDER).is_dir()]
    finals = [parent / name for name in replaced if _NUMBERED.match(name)]
    put_back(finals, exchange=exchange_between_ranks)
    names = {path.name for path in parent.glob("*") if path.is_dir() and _NUMBERED.match(path.name)}
    # The names on all ranks, because hosts with separate disks may have different states, and all ranks must try the same
    # list.
    everyones = {name for theirs in exchange_between_ranks(names) for name in theirs}
    newest_first = sorted(everyones, key=_number, reverse=True)
    if folder is None and naming.automatic_checkpoint_naming:
        # Damaged states count, too, because their names are not free.
        naming.iteration = max((_number(name) + 1 for name in newest_first), default=0)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    passed: list[str] = []
    for path in (parent / name for name in newest_first):
        # A state must be good on every rank: ranks that decided separately would load different states.
        faults = agreed(exchange_between_ranks, _findings(path, rank=rank, world_size=world_size)).faults
        if not faults:
            if passed:
                logger.warning(f"hf_zero: resuming from {path}. Skipped: {'; '.join(passed)}", main_process_only=True)
            return str(path)
        passed.append(f"{path.name}: {shown(', '.join(faults[:3]), 2000)}")
    if passed:
        raise ValueError(
            f"hf_zero: no state in {parent} is good: {'; '.join(passed)}. Nothing was trained: repair or move them, or use "
            "another folder for the run."
        )
    return None


def warn_of_scaled_schedule(accelerator: Accelerator, folder: Path) -> None:
    """Warns if a resumed schedule would jump: accelerate steps a schedule once per process, and the number has changed."""
    saved, now = _ranks_of(folder), accelerator.num_processes
    scaled = [s for s in accelerator._schedulers if s.step_with_optimizer and not s.split_batches]
    if saved not in (None, now) and scaled:
        logger.warning(
            f"hf_zero: before the restart, accelerate stepped the learning rate schedule {saved} times a step, once for each "
            f"process. It now steps it {now} times a step, so the resumed schedule jumps. Create the Accelerator with "
            "step_scheduler_with_optimizer=False, and call scheduler.step() if accelerator.sync_gradients is true.",
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


def _findings(path: Path, *, rank: int, world_size: int) -> Findings:
    if path.is_dir() and not (path / ZERO_FOLDER).is_dir():
        return Findings(faults=(f"it has no {ZERO_FOLDER}/ folder",))
    return findings_in(path, ZERO_FOLDER, rank=rank, world_size=world_size)
