"""Finds the checkpoint to resume from, and checks its completeness."""

import dataclasses
import fnmatch
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from transformers import Trainer, logging
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import SaveStrategy

from ..checkpoint.commit import clear_leftovers, put_back
from ..checkpoint.disks import Disk, disk_with, find_disk
from ..checkpoint.faults import CheckpointError, read_fault, shown
from ..checkpoint.hashes import Progress
from ..checkpoint.json_files import read_mapping
from ..checkpoint.manifest import Manifest, row_file
from ..checkpoint.on_all_ranks import on_all_ranks
from ..checkpoint.run_lock import held_alone
from ..checkpoint.run_log import STATE_NAME, read_position
from ..checkpoint.structure import in_words
from ..checkpoint.torch_files import load_tensors
from ..checkpoint.verify import Candidate, agreed, find_good, findings_in, newest_first
from ..comm.all_or_none import exchange_between_ranks
from ..hooks.replaced import replaced
from .agents_store import trap_of_agents_store
from .progress_bars import progress_of
from .state_io import ZERO_FOLDER

# ---- Faults of the files read by transformers and torch when a Trainer resumes, in addition to weights and optimizer state
# ----

_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "global_step": int,
    "epoch": (*_NUMBER, type(None)),
    "max_steps": int,
    "num_train_epochs": _NUMBER,
    "logging_steps": _NUMBER,
    "eval_steps": _NUMBER,
    "save_steps": _NUMBER,
    "train_batch_size": int,
    "num_input_tokens_seen": _NUMBER,
    "total_flos": _NUMBER,
    "best_metric": (*_NUMBER, type(None)),
    "best_global_step": (int, type(None)),
    "best_model_checkpoint": (str, type(None)),
    "trial_name": (str, type(None)),
    "stateful_callbacks": (dict, type(None)),
    "log_history": (list, type(None)),
}
"""Fields of a Trainer's state, and their allowed types."""
_NEEDED = ("train_batch_size",)
"""Fields needed for arithmetic when a Trainer resumes; None if its file lacks them."""

_PICKLED: dict[str, tuple[str, ...]] = {
    "scheduler.pt": (),
    "scaler.pt": (),
    "optimizer.pt": (),
    "rng_state*.pth": ("python", "numpy", "cpu"),
}
"""Names of files read by `torch.load`, and the keys each must contain."""


def resume_faults(checkpoint: Path) -> list[str]:
    """Lists obstacles to a Trainer's resume: its state, its data position, and the files read by `torch.load`."""
    faults = state_faults(checkpoint)
    try:
        read_position(checkpoint)
    except CheckpointError as error:
        faults.append(in_words(error))
    for path in sorted(checkpoint.iterdir()):
        wanted = next((keys for name, keys in _PICKLED.items() if fnmatch.fnmatchcase(path.name, name)), None)
        fault = None if wanted is None else _load_fault(path, wanted)
        if fault is not None:
            faults.append(f"{path.name} {fault}")
    return faults


def _load_fault(path: Path, wanted: tuple[str, ...]) -> str | None:
    """Describes why a Trainer cannot have written a `torch.load` file; None if the file is good."""
    try:
        # `weights_only`, because a checkpoint may be from the Hub, and a pickle could run code here. The numpy random state in
        # `rng_state*.pth` is an array, which `weights_only` refuses without these safe globals.
        with safe_globals():
            content = load_tensors(path)
    except Exception as error:
        # Catch all, because each reader raises its own errors for a file that is not a pickle.
        return read_fault(error)
    is_written = isinstance(content, dict) and all(name in content for name in wanted)
    return None if is_written else "has contents that Trainer never writes there"


def state_faults(checkpoint: Path) -> list[str]:
    """Lists obstacles to a resume in a checkpoint's Trainer state."""
    path = checkpoint / STATE_NAME
    if not path.is_file():
        return [f"{STATE_NAME} is missing, so it is not a checkpoint of a Trainer"]
    try:
        content = read_mapping(path)
    except CheckpointError as error:
        return [in_words(error)]
    known = {field.name for field in dataclasses.fields(TrainerState)}
    faults = [f"{STATE_NAME} has {name!r}, which Trainer does not know" for name in content if name not in known]
    faults += [f"{STATE_NAME} lacks {name}, which every Trainer writes" for name in _NEEDED if name not in content]
    for name, kinds in _KINDS.items():
        value = content.get(name)
        # JSON integers have any size; torch and Trainer would fail on larger ones in the middle of a resume.
        if name in content and (not isinstance(value, kinds) or (type(value) is int and not 0 <= value < 2**63)):
            faults.append(f"{name} in {STATE_NAME} is {shown(repr(value), 80)}, which Trainer never writes")
    return faults


logger = logging.get_logger(__name__)

LAST_GOOD = "last-good"

_THEN = (
    "Nothing was trained. Make the folder writable and free some space, or use another output_dir. A new run with "
    "save_strategy='no' does not need the folder."
)
_LONGEST = 2000


def checkpoint_to_resume(trainer: Trainer, asked: str | bool | None, *, goes_on: bool = False) -> str | None:
    """Returns the folder to resume from: the requested one; for True and "last-good", the newest good one. Collective.

    Args:
        trainer: the Trainer.
        asked: the value of `resume_from_checkpoint`.
        goes_on: `checkpoint.resume: auto`: prefer the newest good checkpoint of output_dir over the requested one, and accept
            none.

    Raises:
        ValueError: the requested folder has faults; for True, there is no good one; with `goes_on`, there are some but none is
            good. Lists each checkpoint with its faults.
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
                "trained: repair or move them, or use another output_dir for the run."
            )
        # A folder requested by name is only for the first start, when output_dir has no checkpoint yet.
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
        # Begins like Trainer's own error.
        raise ValueError(
            f"No valid checkpoint found in output directory ({output_dir}){': ' if said else ''}{said}. Omit "
            "resume_from_checkpoint, or pass 'last-good', which starts from step 0 if there is none."
        )
    if rank == 0 and found is None:
        logger.warning(f"hf_zero: no good checkpoint in {output_dir} ({said or 'it holds none'}); starting afresh.")
    return found


def _refuse_faulty(trainer: Trainer, asked: Path, output_dir: Path) -> None:
    put_back([asked.resolve()], exchange=exchange_between_ranks)
    # Not `find_disk`, which writes a file: a checkpoint may be in a read-only folder.
    disk = disk_with(asked, trainer.args.process_index, exchange_between_ranks)
    with _checking(trainer) as show:
        mine = findings_in(asked, ZERO_FOLDER, rank=disk.index, world_size=len(disk.ranks), on_progress=show)
    # The manifest's faults first, because faults of Trainer's files may follow from truncated files.
    own_faults = checkpoints_inside(asked) or mine.faults or resume_faults(asked)
    # Agree before raising: each rank has read a part of the files, and if only one rank raised, the others would wait.
    found = agreed(exchange_between_ranks, dataclasses.replace(mine, faults=tuple(own_faults)))
    if found.edits and trainer.args.process_index == 0:
        logger.warning(found.warning(asked))
    if found.faults:
        there = ", ".join(sorted(path.name for path in output_dir.glob("checkpoint-*"))) or "none"
        raise ValueError(
            f"hf_zero: cannot resume from {str(asked)!r}: {shown('; '.join(found.faults), _LONGEST)}. Checkpoints in "
            f"{str(output_dir)!r}: {there}. Pass one of those, or resume_from_checkpoint={LAST_GOOD!r} for the "
            "newest good one."
        )


def _newest_good(trainer: Trainer, output_dir: Path) -> tuple[str | None, list[Candidate]]:
    """Returns a folder's newest good checkpoint, and the newer ones with their faults. Collective."""
    rank = trainer.args.process_index
    disk = find_disk(output_dir, rank, exchange_between_ranks, then=_THEN)
    on_all_ranks(
        exchange_between_ranks,
        # Before the search, so a checkpoint renamed by an interrupted save is restored under its name and counts again.
        lambda: clear_leftovers(output_dir) if disk.leads else None,
        doing=f"delete leftovers of killed runs in {output_dir}",
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
            on_edits=logger.warning if rank == 0 else lambda _: None,
            on_progress=show,
        )
    if rank == 0 and found is not None and passed:
        logger.warning(f"hf_zero: resuming from {found}. Skipped: {_in_words(passed)}")
    return None if found is None else str(found), passed


def parts_elsewhere(folder: Path, rank: int, world_size: int) -> list[str]:
    """Returns the fault of a checkpoint if this rank's part is on another host's disk."""
    if not folder.is_dir():
        return []
    manifest = Manifest.read(folder)
    own = row_file(rank, world_size)
    # If the manifest names no other disks, every file must be here, as the checksums have shown.
    if not manifest.elsewhere or (manifest.world_size == world_size and own not in manifest.elsewhere):
        return []
    return [
        f"each host has a part of it, saved by {manifest.world_size} ranks, and the part of rank {rank} of {world_size} is "
        "missing here (an output_dir shared by all hosts has no such parts)"
    ]


def _warn_of_beginning_again(output_dir: Path, rank: int) -> None:
    """Warns if a launcher restarts a run without resuming."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if restarts and rank == 0 and any(newest_first(output_dir)):
        logger.warning(
            f"hf_zero: the launcher has restarted this run ({restarts} times), and training starts again at step 0, although "
            f"{output_dir} has checkpoints. Set `checkpoint.resume: auto` to resume from the newest good one."
        )


def _checking(trainer: Trainer) -> AbstractContextManager[Progress]:
    return progress_of(
        "checking the checkpoint", is_main=trainer.args.process_index == 0 and not trainer.args.disable_tqdm
    )


def _in_words(passed: list[Candidate]) -> str:
    return "; ".join(f"{each.path.name}: {shown(', '.join(each.faults[:3]), _LONGEST)}" for each in passed)


def share_output_dir(trainer: Trainer) -> None:
    """Makes all ranks write to rank 0's output_dir if they name different folders, for example by their clocks. Collective.

    Keeps each rank's own name if the ranks may write to separate disks.
    """
    args = trainer.args
    names = exchange_between_ranks(args.output_dir)
    if len(set(names)) == 1 or not _writes_one_file(trainer):
        return
    # Different paths may also be the same folder, mounted differently on different hosts.
    if disk_with(Path(args.output_dir), args.process_index, exchange_between_ranks).is_of_all:
        return
    args.output_dir = names[0]
    if args.process_index == 0:
        listed = ", ".join(repr(name) for name in dict.fromkeys(names[:4]))
        logger.warning(
            f"hf_zero: the ranks have different output_dirs ({shown(listed)}). All ranks write to rank 0's, which is "
            "`args.output_dir` now. Choose a name that is the same on all ranks, without the time of each rank's clock."
        )


def refuse_separate_disks(trainer: Trainer, disk: Disk) -> None:
    """Refuses a run whose first save would fail. Collective.

    Raises:
        CheckpointError: on every rank, if ranks with separate disks would write into one file.
    """
    fault = None if disk.is_of_all or not _writes_one_file(trainer) else separate_disks(trainer, disk)
    first = next(filter(None, exchange_between_ranks(fault)), None)
    if first is not None:
        raise CheckpointError(first)


def separate_disks(trainer: Trainer, disk: Disk) -> str:
    """Returns the error message for ranks with separate disks writing into one file."""
    settings = trainer.accelerator.zero_config.checkpoint
    return (
        f"hf_zero: only ranks {list(disk.ranks)} of {disk.world_size} see the same output_dir {trainer.args.output_dir!r} as "
        f"rank {disk.rank}, but all write one weights file. Use one folder for all hosts, or set `checkpoint.layout: sharded`"
        + (", without `checkpoint.full_every`." if settings.full_every else ".")
    )


def _writes_one_file(trainer: Trainer) -> bool:
    settings = trainer.accelerator.zero_config.checkpoint
    return (settings.layout == "hf" or bool(settings.full_every)) and not trainer.args.save_on_each_node


@contextmanager
def alone_in_output_dir(trainer: Trainer, resume: object, *, goes_on: bool = False) -> Iterator[None]:
    """Locks a Trainer's output_dir against other runs while checkpoints are written or cleared. Collective.

    Raises:
        CheckpointError: on every rank, if another run has locked the folder, or the folder is not writable.
    """
    args = trainer.args
    # Without saves, nothing is written or cleared: another run may hold the lock, and the folder need not be writable.
    saves = args.save_strategy != SaveStrategy.NO
    if not saves and resume is not True and resume != LAST_GOOD and not goes_on:
        yield
        return
    if saves:
        share_output_dir(trainer)
    output_dir = Path(args.output_dir)
    # If a subclass's `train` calls `train` again, this Trainer already holds the lock.
    if trainer._alone_in == output_dir:
        yield
        return
    disk = find_disk(output_dir, args.process_index, exchange_between_ranks, then=_THEN)
    if saves and trainer.accelerator.zero_config.checkpoint.on_failure == "stop":
        # Refuse before training, because the first save would end the run.
        refuse_separate_disks(trainer, disk)
    # Lock before clearing leftovers: another run's unfinished checkpoint has the same kind of name.
    with held_alone(output_dir, disk=disk, exchange=exchange_between_ranks), replaced(trainer, "_alone_in", output_dir):
        yield


def checkpoints_inside(folder: Path) -> list[str]:
    """Returns the fault of a folder of checkpoints, naming the newest."""
    if (folder / ZERO_FOLDER).is_dir() or (folder / STATE_NAME).is_file() or not folder.is_dir():
        return []
    inside = next(newest_first(folder), None)
    return [] if inside is None else [f"it is a folder of checkpoints; pass the newest of them, {str(inside)!r}"]
