"""Where `accelerator.save_state` writes: aside, and renamed when it is whole."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.logging import get_logger

from ...checkpoint.folder.commit import abandon, begin, commit, discard
from ...checkpoint.folder.disks import Disk
from ...checkpoint.foreign.find import is_foreign
from ...checkpoint.format.files import files_below, no_folder
from ...checkpoint.format.manifest import MANIFEST_NAME, CheckpointError, Manifest
from ...engine.engine import ZeroEngine
from ..checkpoints.checkpointing import ZERO_FOLDER, state_bytes

logger = get_logger(__name__)

_NUMBERED = re.compile(r"^checkpoint_(\d+)$")


@contextmanager
def folder_to_fill(accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None) -> Iterator[tuple[Path, Path]]:
    """The folder that a state is to be written to, and the one that it is in afterwards. Collective.

    A folder that holds something else than a former state is filled in place. There the manifest, written last, tells a whole
    state from a part of one.

    Raises:
        ValueError: no folder is given, or a file's name; accelerate's automatic naming comes to a folder that is there.
        CommunicationError: a rank does not come.
    """
    with engine.transport.watch.saving(), _folder_to_fill(accelerator, engine, output_dir) as folders:
        yield folders


@contextmanager
def _folder_to_fill(
    accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None
) -> Iterator[tuple[Path, Path]]:
    engine.world.meet("accelerator.save_state", engine.config.comm.limit_s)
    naming = accelerator.project_configuration
    is_automatic = naming.automatic_checkpoint_naming
    if is_automatic:
        final = _states_of(accelerator) / f"checkpoint_{naming.iteration}"
    elif output_dir is not None:
        final = Path(output_dir).expanduser()
        # A link stays one: what it leads to, perhaps on another disk, is replaced.
        final = final.resolve() if final.is_symlink() else final
    else:
        raise ValueError(
            "hf_zero: save_state() was called without a folder, and accelerate's automatic naming is off. Give the folder, or "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True) to the Accelerator."
        )
    exchange = engine.world.exchange
    asked = list(dict.fromkeys(exchange(str(final), "save_state")))
    if len(asked) > 1:
        raise ValueError(
            f"hf_zero: the ranks save their state to different folders: {', '.join(asked[:4])}. Each rank's part belongs to one "
            "folder: give save_state the same one on every rank."
        )
    if is_automatic and exchange(final.exists())[0]:
        raise ValueError(
            f"hf_zero: {final} is there already. Set accelerator.project_configuration.iteration to the number to go on with."
        )
    if exchange(final.exists() and not final.is_dir())[0]:
        raise ValueError(f"hf_zero: {final} is a file, and a state is a folder. Give save_state another name.")
    if exchange(_holds_something_else(final))[0]:
        yield final, final
        return
    disk = Disk.shared(engine.world_groups.rank, engine.world_groups.world_size)
    temporary = begin(final, needed_bytes=state_bytes(engine, disk), disk=disk, exchange=exchange)
    naming.automatic_checkpoint_naming = False
    try:
        yield temporary, final
        commit(temporary, final, disk=disk, exchange=exchange)
    except BaseException:
        abandon(temporary, disk=disk)
        raise
    finally:
        naming.automatic_checkpoint_naming = is_automatic
    if is_automatic and naming.total_limit is not None and disk.leads:
        # The new one is there before an old one goes.
        for old in numbered_states(accelerator)[: -naming.total_limit]:
            discard(old)


def numbered_states(accelerator: Accelerator) -> list[Path]:
    """What accelerate's automatic naming has written, the newest last."""
    found = [path for path in _states_of(accelerator).glob("checkpoint_*") if _NUMBERED.match(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


def _holds_something_else(folder: Path) -> bool:
    names = set(files_below(folder))
    try:
        vouched = {*Manifest.read(folder / ZERO_FOLDER).files, f"{ZERO_FOLDER}/{MANIFEST_NAME}"}
    except CheckpointError:
        vouched = set()
    return not names <= vouched


def _states_of(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def refuse_unless_state(folder: Path) -> None:
    """Raises `ValueError` for a folder that no `save_state` with the engine has written."""
    if not (folder / ZERO_FOLDER).is_dir() and is_foreign(folder):
        raise ValueError(
            f"hf_zero: {folder} is a checkpoint of DeepSpeed or FSDP; make one of it with `hf-zero convert {folder} OUT` and "
            "give OUT."
        )
    if not (folder / ZERO_FOLDER).is_dir():
        found = sorted(p.name for p in folder.iterdir())[:8] if folder.is_dir() else no_folder(folder)
        inside = [path for path in sorted(folder.glob("*")) if (path / ZERO_FOLDER).is_dir()]
        raise ValueError(
            f"hf_zero: {folder} is not a state saved with hf_zero: it has no {ZERO_FOLDER}/ folder ({found}). Give a folder "
            "that accelerator.save_state wrote in a run with the plugin"
            + (f"; {inside[-1].name} is inside: load_state({str(inside[-1])!r})." if inside else ".")
        )
