"""Which checkpoint a Trainer resumes from: the one asked for, or the newest that is good."""

from pathlib import Path

import torch.distributed as dist
from transformers import Trainer, logging

from ..checkpoint.commit import clear_leftovers
from ..checkpoint.disks import disk_with, find_disk
from ..checkpoint.together import together
from ..checkpoint.verify import Candidate, checkpoint_faults, find_good
from .checkpointing import ZERO_FOLDER

logger = logging.get_logger(__name__)

LAST_GOOD = "last-good"


def checkpoint_to_resume(trainer: Trainer, asked: str | bool | None) -> str | None:
    """The folder to resume from: the one asked for, or for True and "last-good" the newest good one. Collective.

    Raises:
        ValueError: the folder asked for has faults; or for True, there is no good one. Lists each with its faults.
    """
    if asked is None or asked is False:
        return None
    output_dir = Path(trainer.args.output_dir)
    rank = trainer.args.process_index
    if asked is not True and asked != LAST_GOOD:
        disk = disk_with(Path(asked), rank, exchange_between_ranks)
        mine = checkpoint_faults(Path(asked), ZERO_FOLDER, rank=disk.place, world_size=len(disk.ranks))
        faults = dict.fromkeys(fault for theirs in exchange_between_ranks(mine) for fault in theirs)
        if faults:
            there = sorted(path.name for path in output_dir.glob("checkpoint-*"))
            raise ValueError(
                f"hf_zero: cannot resume from {str(asked)!r}: {'; '.join(faults)}. Checkpoints in {str(output_dir)!r}: "
                f"{', '.join(there) or 'none'}. Pass one of those, or resume_from_checkpoint={LAST_GOOD!r} for the newest good "
                "one."
            )
        return str(asked)
    then = "Nothing was trained; make the folder writable."
    disk = find_disk(output_dir, rank, exchange_between_ranks, then=then)
    together(
        exchange_between_ranks,
        lambda: clear_leftovers(output_dir) if disk.leads else None,
        doing=f"clear {output_dir} of what killed runs left",
        then=then,
    )
    found, passed = find_good(output_dir, ZERO_FOLDER, disk=disk, exchange=exchange_between_ranks)
    said = _in_words(passed)
    if found is None and asked is True:
        raise ValueError(f"No valid checkpoint found in output directory ({output_dir}){': ' if said else ''}{said}")
    if rank == 0 and found is None:
        logger.warning(f"hf_zero: no good checkpoint in {output_dir} ({said or 'it holds none'}); starting afresh.")
    elif rank == 0 and passed:
        logger.warning(f"hf_zero: resuming from {found}. Passed over: {said}")
    return None if found is None else str(found)


def _in_words(passed: list[Candidate]) -> str:
    return "; ".join(f"{candidate.path.name}: {', '.join(candidate.faults[:3])}" for candidate in passed)


def exchange_between_ranks(value: object) -> list:
    """Every rank's picklable value in rank order, before there is an engine."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
