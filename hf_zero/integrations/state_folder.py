"""The folder of `accelerator.save_state`: temporary until complete, then renamed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.logging import get_logger

from ..checkpoint.commit import abandon, begin, commit, discard
from ..checkpoint.disks import Disk
from ..checkpoint.faults import CheckpointError, shown
from ..checkpoint.files import files_below, no_folder
from ..checkpoint.manifest import MANIFEST_NAME, Manifest, new_save
from ..checkpoint.origin import is_foreign
from ..engine.engine import ZeroEngine
from .state_io import ZERO_FOLDER, state_bytes

logger = get_logger(__name__)

_NUMBERED = re.compile(r"^checkpoint_(\d+)$")


@contextmanager
def folder_to_fill(
    accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None
) -> Iterator[tuple[Path, Path, str]]:
    """Yields the folder to write a state to, its final name, and the ID of the save. Collective.

    A folder with files other than a former state is filled in place. There, the manifest is written last and marks the state
    as complete.

    Raises:
        ValueError: no folder is given, the name is a file's, or the folder of accelerate's automatic naming already exists.
        CommunicationError: a rank does not join the save.
    """
    with engine.transport.watch.saving(), _folder_to_fill(accelerator, engine, output_dir) as folders:
        yield folders


@contextmanager
def _folder_to_fill(
    accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None
) -> Iterator[tuple[Path, Path, str]]:
    # Before any folder is created: if a rank does not join the save, the barrier names the rank within the time limit.
    engine.world.barrier("accelerator.save_state", engine.config.comm.limit_s)
    naming = accelerator.project_configuration
    is_automatic = naming.automatic_checkpoint_naming
    if is_automatic:
        final = _states_of(accelerator) / f"checkpoint_{naming.iteration}"
    elif output_dir is not None:
        final = Path(output_dir).expanduser()
        # A link is kept and its target, perhaps on another disk, is replaced.
        final = final.resolve() if final.is_symlink() else final
    else:
        raise ValueError(
            "hf_zero: save_state() was called without a folder, and accelerate's automatic naming is off. Pass the folder, or "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True) to the Accelerator."
        )
    exchange = engine.world.exchange
    mine = new_save() if engine.world_groups.rank == 0 else ""
    told = exchange((str(final), accelerator.project_dir, mine), "save_state")
    folders, save = list(dict.fromkeys(folder for folder, _, _ in told)), told[0][2]
    if len(folders) > 1:
        # Ranks may name the folder by their own clocks. Each rank would write a part, and no folder would be complete.
        final = Path(folders[0])
        if is_automatic:
            # The next `load_state` and the rotation look for states here as well.
            naming.project_dir = told[0][1]
        # accelerate's logger prints on the main process only.
        logger.warning(
            f"hf_zero: the ranks save their state to different folders: {shown(', '.join(folders[:4]))}. All ranks write to rank "
            "0's: pass the same folder to save_state on every rank."
        )
    # Here and below, all ranks use rank 0's answer: if the answers differed, the ranks without an error would wait for the
    # others in the next exchange.
    if is_automatic and exchange(final.exists())[0]:
        raise ValueError(
            f"hf_zero: {final} already exists. Set accelerator.project_configuration.iteration to the next free number."
        )
    if exchange(final.exists() and not final.is_dir())[0]:
        raise ValueError(
            f"hf_zero: {final} is a file, but save_state writes a folder. Pass another name to save_state."
        )
    if exchange(_holds_something_else(final))[0]:
        yield final, final, save
        return
    disk = Disk.shared(engine.world_groups.rank, engine.world_groups.world_size)
    temporary = begin(final, needed_bytes=state_bytes(engine, disk), disk=disk, merge=engine.world.merge)
    # Otherwise accelerate would append its own number to the temporary folder.
    naming.automatic_checkpoint_naming = False
    try:
        yield temporary, final, save
        # After the caller has written accelerate's own files: the rename publishes all files at once.
        commit(temporary, final, disk=disk, merge=engine.world.merge)
    except BaseException:
        abandon(temporary, disk=disk)
        raise
    finally:
        naming.automatic_checkpoint_naming = is_automatic
    if is_automatic and naming.total_limit is not None and disk.leads:
        # After the commit, so a failed save removes no old state. The new state always stays, as in accelerate with a limit of
        # 0.
        for old in numbered_states(accelerator)[: -max(naming.total_limit, 1)]:
            discard(old)


def numbered_states(accelerator: Accelerator) -> list[Path]:
    """Lists the states named by accelerate's automatic naming, oldest first."""
    named = _states_of(accelerator).glob("checkpoint_*")
    found = [path for path in named if _NUMBERED.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


def _holds_something_else(folder: Path) -> bool:
    names = set(files_below(folder))
    try:
        vouched = {*Manifest.read(folder / ZERO_FOLDER).files, f"{ZERO_FOLDER}/{MANIFEST_NAME}"}
    except CheckpointError:
        # The folder is no state of ours, or a damaged one. Its files may be the user's, so a rename must not remove them.
        vouched = set()
    return not names <= vouched


def _states_of(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def refuse_unless_state(folder: Path) -> None:
    """Raises `ValueError` for a folder not written by `save_state` with an engine."""
    if not (folder / ZERO_FOLDER).is_dir() and is_foreign(folder):
        raise ValueError(
            f"hf_zero: {folder} is a checkpoint of DeepSpeed or FSDP; convert it with `hf-zero convert {folder} OUT`, and "
            "pass OUT."
        )
    if not (folder / ZERO_FOLDER).is_dir():
        found = sorted(p.name for p in folder.iterdir())[:8] if folder.is_dir() else no_folder(folder)
        inside = [path for path in sorted(folder.glob("*")) if (path / ZERO_FOLDER).is_dir()]
        raise ValueError(
            f"hf_zero: {folder} is not a state saved with hf_zero: it has no {ZERO_FOLDER}/ folder ({found}). Pass a folder "
            "that accelerator.save_state wrote in a run with the plugin"
            + (f"; {inside[-1].name} is inside: load_state({str(inside[-1])!r})." if inside else ".")
        )
