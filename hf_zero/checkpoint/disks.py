"""Which ranks write to the same disk: all hosts may share one, or each host has its own."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..comm.all_or_none import Exchange
from .files import (
    MARK,
)
from .on_all_ranks import on_all_ranks

_PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The ranks with access to the same folder. The first of them does the work needed once per disk.

    Attributes:
        ranks: in order, including this rank.
        rank: this rank.
        world_size: the number of ranks of all disks.
    """

    ranks: tuple[int, ...]
    rank: int
    world_size: int

    @classmethod
    def shared(cls, rank: int = 0, world_size: int = 1) -> "Disk":
        return cls(ranks=tuple(range(world_size)), rank=rank, world_size=world_size)

    @property
    def leads(self) -> bool:
        """Whether this rank makes the folders, manifests and renames on its disk."""
        return self.rank == self.ranks[0]

    @property
    def index(self) -> int:
        """The index of this rank among the ranks of its disk, from 0."""
        return self.ranks.index(self.rank)

    @property
    def is_of_all(self) -> bool:
        return len(self.ranks) == self.world_size


@contextmanager
def disk_asked(folder: Path) -> Iterator[None]:
    """Raises the disk's own error instead of torch.save's "unexpected pos", which hides a full disk.

    Raises:
        OSError: the disk refuses any write to `folder`, for this reason.
    """
    try:
        yield
    except RuntimeError as error:
        probe = folder / f"{MARK}{uuid.uuid4().hex}"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        except OSError as refusal:
            raise refusal from error
        finally:
            probe.unlink(missing_ok=True)
        raise


def disk_with(path: Path, rank: int, exchange: Exchange) -> Disk:
    """Finds the ranks with the same file or folder at `path`. Collective; writes nothing."""

    def identity() -> tuple[int, int] | None:
        # A copy has another inode number, or another change time: no tool can set an inode's change time.
        return (path.stat().st_ino, path.stat().st_ctime_ns) if path.exists() else None

    found = exchange(identity())
    ranks = tuple(number for number, theirs in enumerate(found) if theirs == found[rank])
    return Disk(ranks=ranks, rank=rank, world_size=len(found))


def find_disk(folder: Path, rank: int, exchange: Exchange, *, then: str) -> Disk:
    """Makes `folder`, puts a mark file there and finds the ranks which see the file. Collective.

    Args:
        then: what a failure means, in words.

    Raises:
        CheckpointError: on every rank, if one of them cannot write there.
    """
    # All ranks use a name of rank 0's and their own numbers: a message with a name for each rank would grow with the ranks.
    name, *others = exchange(uuid.uuid4().hex if rank == 0 else "")
    marks = [folder / f"{MARK}{name}-{number}" for number in range(1 + len(others))]
    mark = marks[rank]

    def put() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)

    try:
        on_all_ranks(exchange, put, doing=f"write to {folder}", then=then)
        # Each exchange also waits until all ranks have looked. Removing a mark earlier would hide its rank from slower ranks.
        if all(exchange(marks[0].exists())):
            return Disk.shared(rank, len(marks))
        seen = tuple(number for number, each in enumerate(marks) if each.exists())
        exchange(None)
    finally:
        # Remove this rank's mark also if another rank could not write. If `folder` is a file, the error above names the folder.
        with suppress(OSError):
            mark.unlink()
    return Disk(ranks=seen, rank=rank, world_size=len(marks))
