"""Which ranks write to the same disk: one that all hosts share, or one of each host's own."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...comm.all_or_none import Exchange
from .on_all_ranks import on_all_ranks

MARK = ".hf_zero-"
"""Begins the names of files by which ranks find out whether they see the same folder."""


_PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The ranks that see a folder as this rank does. The first of them does what is done once on a disk.

    Attributes:
        ranks: in order; this one is among them.
        rank: this one.
        world_size: ranks of all disks.
    """

    ranks: tuple[int, ...]
    rank: int
    world_size: int

    @classmethod
    def shared(cls, rank: int = 0, world_size: int = 1) -> "Disk":
        """One that all ranks see."""
        return cls(ranks=tuple(range(world_size)), rank=rank, world_size=world_size)

    @property
    def leads(self) -> bool:
        """Whether this rank makes folders, manifests and renames here."""
        return self.rank == self.ranks[0]

    @property
    def place(self) -> int:
        """This rank's number among those of the disk."""
        return self.ranks.index(self.rank)

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks see the folder."""
        return len(self.ranks) == self.world_size


@contextmanager
def disk_asked(folder: Path) -> Iterator[None]:
    """Raises the disk's own error where `torch.save` fails of a disk that takes no more: it says "unexpected pos" of that.

    Raises:
        OSError: the disk refuses to write to `folder` at all, for this reason.
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
    """Looks which ranks find the same file or folder at `path`, which nobody changes meanwhile. Collective; writes nothing."""

    def identity() -> tuple[int, int] | None:
        # A copy has another inode, or one of another time; no tool can set the time of an inode's change.
        return (path.stat().st_ino, path.stat().st_ctime_ns) if path.exists() else None

    found = exchange(identity())
    ranks = tuple(number for number, theirs in enumerate(found) if theirs == found[rank])
    return Disk(ranks=ranks, rank=rank, world_size=len(found))


def find_disk(folder: Path, rank: int, exchange: Exchange, *, then: str) -> Disk:
    """Looks which ranks see in `folder` what this rank puts there; makes the folder. Collective.

    Args:
        then: what a failure means, in words.

    Raises:
        CheckpointError: on every rank, where one cannot write there.
    """
    mark = folder / f"{MARK}{uuid.uuid4().hex}"

    def put() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        return mark.name

    names = on_all_ranks(exchange, put, doing=f"write to {folder}", then=then)
    seen = tuple(number for number, name in enumerate(names) if (folder / name).exists())
    exchange(None)
    mark.unlink(missing_ok=True)
    return Disk(ranks=seen, rank=rank, world_size=len(names))
