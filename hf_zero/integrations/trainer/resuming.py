"""Which checkpoint a Trainer resumes from: the one asked for, or the newest that is good."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from transformers import Trainer, logging
from transformers.trainer_utils import SaveStrategy

from ...checkpoint.folder.commit import clear_leftovers
from ...checkpoint.folder.disks import disk_with, find_disk
from ...checkpoint.folder.on_all_ranks import on_all_ranks
from ...checkpoint.folder.run_lock import held_alone
from ...checkpoint.format.files import Progress
from ...checkpoint.format.manifest import Manifest
from ...checkpoint.format.text import shown
from ...checkpoint.structure import STATE_NAME
from ...checkpoint.verify import Candidate, checkpoint_faults, find_good, newest_first
from ...checkpoint.writer import row_file
from ..checkpoints.checkpointing import ZERO_FOLDER
from ..checkpoints.progress import progress_of
from ..checkpoints.resume_files import resume_faults
from ..elastic.agents_store import trap_of_agents_store
from ..elastic.exchange import exchange_between_ranks

logger = logging.get_logger(__name__)

LAST_GOOD = "last-good"

_THEN = (
    "Nothing was trained. Make the folder writable and free some room, or give another output_dir; a run with save_strategy='no' "
    "that starts afresh needs none."
)
_LONGEST = 2000


def checkpoint_to_resume(trainer: Trainer, asked: str | bool | None, *, goes_on: bool = False) -> str | None:
    """The folder to resume from: the one asked for, or for True and "last-good" the newest good one. Collective.

    Args:
        goes_on: the newest good one of output_dir comes before the one asked for, and none is needed (`checkpoint.resume: auto`).

    Raises:
        ValueError: the folder asked for has faults; or for True, there is no good one; or with `goes_on`, there are some and none
            is good. Lists each with its faults.
    """
    output_dir, rank = Path(trainer.args.output_dir), trainer.args.process_index
    trap = trap_of_agents_store() if goes_on else None
    if trap is not None and rank == 0:
        logger.warning(trap)
    if goes_on and asked is not False:
        found, passed = _newest_good(trainer, output_dir)
        if found is None and passed:
            raise ValueError(
                f"hf_zero: `checkpoint.resume: auto` finds no good checkpoint in {output_dir}: {_in_words(passed)}. Nothing was "
                "trained: mend or move them, or give the run another output_dir."
            )
        if found is not None or asked is True or asked is None:
            return found
    if asked is None or asked is False:
        _warn_of_beginning_again(output_dir, rank)
        return None
    if asked is not True and asked != LAST_GOOD:
        _refuse_faulty(trainer, Path(asked), output_dir)
        return str(asked)
    found, passed = _newest_good(trainer, output_dir)
    said = _in_words(passed)
    if found is None and asked is True:
        raise ValueError(f"No valid checkpoint found in output directory ({output_dir}){': ' if said else ''}{said}")
    if rank == 0 and found is None:
        logger.warning(f"hf_zero: no good checkpoint in {output_dir} ({said or 'it holds none'}); starting afresh.")
    return found


def _refuse_faulty(trainer: Trainer, asked: Path, output_dir: Path) -> None:
    disk = disk_with(asked, trainer.args.process_index, exchange_between_ranks)
    with _checking(trainer) as show:
        mine = checkpoint_faults(asked, ZERO_FOLDER, rank=disk.place, world_size=len(disk.ranks), on_progress=show)
    mine = checkpoints_inside(asked) or mine or resume_faults(asked)
    faults = dict.fromkeys(fault for theirs in exchange_between_ranks(mine) for fault in theirs)
    if faults:
        there = ", ".join(sorted(path.name for path in output_dir.glob("checkpoint-*"))) or "none"
        raise ValueError(
            f"hf_zero: cannot resume from {str(asked)!r}: {shown('; '.join(faults), _LONGEST)}. Checkpoints in "
            f"{str(output_dir)!r}: {there}. Pass one of those, or resume_from_checkpoint={LAST_GOOD!r} for the "
            "newest good one."
        )


def _newest_good(trainer: Trainer, output_dir: Path) -> tuple[str | None, list[Candidate]]:
    """The newest good checkpoint of a folder, and the newer ones with their faults. Collective."""
    rank = trainer.args.process_index
    disk = find_disk(output_dir, rank, exchange_between_ranks, then=_THEN)
    on_all_ranks(
        exchange_between_ranks,
        lambda: clear_leftovers(output_dir) if disk.leads else None,
        doing=f"clear {output_dir} of what killed runs left",
        then=_THEN,
    )
    with _checking(trainer) as show:
        found, passed = find_good(
            output_dir,
            ZERO_FOLDER,
            disk=disk,
            exchange=exchange_between_ranks,
            further_faults=lambda path: (
                resume_faults(path) or parts_elsewhere(path / ZERO_FOLDER, rank, disk.world_size)
            ),
            on_progress=show,
        )
    if rank == 0 and found is not None and passed:
        logger.warning(f"hf_zero: resuming from {found}. Passed over: {_in_words(passed)}")
    return None if found is None else str(found), passed


def parts_elsewhere(folder: Path, rank: int, world_size: int) -> list[str]:
    """The fault of a checkpoint on disks of several hosts whose part for this rank is not on this host's."""
    if not folder.is_dir():
        return []
    manifest = Manifest.read(folder)
    own = row_file(rank, world_size)
    if not manifest.elsewhere or (manifest.world_size == world_size and own not in manifest.elsewhere):
        return []
    return [
        f"each host has a part of it, of {manifest.world_size} ranks, and rank {rank} of {world_size} has not its own here "
        "(an output_dir that all hosts share has no such parts)"
    ]


def _warn_of_beginning_again(output_dir: Path, rank: int) -> None:
    """Names the trap of a launcher that restarts a run which does not resume."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if restarts and rank == 0 and any(newest_first(output_dir)):
        logger.warning(
            f"hf_zero: the launcher has restarted this run ({restarts} times), and training begins again at step 0 beside the "
            f"checkpoints in {output_dir}. Set `checkpoint.resume: auto` to go on from the newest good one."
        )


def _checking(trainer: Trainer) -> AbstractContextManager[Progress]:
    return progress_of(
        "checking the checkpoint", is_main=trainer.args.process_index == 0 and not trainer.args.disable_tqdm
    )


def _in_words(passed: list[Candidate]) -> str:
    return "; ".join(f"{each.path.name}: {shown(', '.join(each.faults[:3]), _LONGEST)}" for each in passed)


@contextmanager
def alone_in_output_dir(trainer: Trainer, resume: object, *, goes_on: bool = False) -> Iterator[None]:
    """Keeps other runs out of a Trainer's output_dir, where it is to write or to clear checkpoints there. Collective.

    Raises:
        CheckpointError: on every rank: another run has the folder, or it cannot be written to.
    """
    args = trainer.args
    if args.save_strategy == SaveStrategy.NO and resume is not True and resume != LAST_GOOD and not goes_on:
        yield
        return
    output_dir = Path(args.output_dir)
    disk = find_disk(output_dir, args.process_index, exchange_between_ranks, then=_THEN)
    with held_alone(output_dir, disk=disk, exchange=exchange_between_ranks):
        yield


def checkpoints_inside(folder: Path) -> list[str]:
    """The fault of a folder that is no checkpoint and has some: it names the newest."""
    if (folder / ZERO_FOLDER).is_dir() or (folder / STATE_NAME).is_file() or not folder.is_dir():
        return []
    inside = next(newest_first(folder), None)
    return (
        [] if inside is None else [f"it is a folder of checkpoints; {inside.name} is inside, so give {str(inside)!r}"]
    )
