"""Which chunks of a checkpoint a rank verifies: if possible, the ones the rank will load."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..layout.intervals import Interval, joined_intervals
from .hashes import Chunk, FileRecord
from .manifest import (
    WEIGHTS,
    Manifest,
    SavedRows,
    rank_of,
)
from .safetensors_headers import tensors_in


# [Note: each rank verifies what it loads] A resume reads a checkpoint twice: first to verify, then to load. Ranks of one host
# share the system's page cache, ranks of different hosts do not. So each rank verifies the bytes it will probably load: a file in
# `zero/` is verified by the rank at the relative position of the file's writer, and a part of a weights file by the rank at
# the relative position of the owner of the parameter's state. With the same number of ranks and the same stage as before,
# the rank loads exactly these bytes. Otherwise a wrong guess only costs a second read: some rank still verifies each byte.
def own_chunks(root: Path, manifest: Manifest, *, rank: int, world_size: int) -> list[Chunk]:
    """Returns the chunks of a checkpoint's recorded files for one of `world_size` ranks to verify.

    If several ranks will load parts of a chunk, each of them verifies it. All ranks verify the headers of the weights files.
    The time depends on the number of parameters and on this rank's chunks, not on the number of ranks that wrote the
    checkpoint.

    Args:
        root: the checkpoint folder.
    """
    writers = sorted({number for name in manifest.files if (number := _writer(name, manifest)) is not None})
    owned = _owned_rows(manifest, writers)
    chunks = []
    for name, whole in _whole_files(manifest, writers).items():
        # Not of the ranks' files: the bytes of all their headers grow with parameters times ranks.
        is_weights = name.endswith(".safetensors") and _writer(name, manifest) is None
        tensors = tensors_in(root / name) if is_weights else {}
        runs = [
            _Run(begin=begin, itemsize=itemsize, rows=rows, position=position, writers=writers)
            for tensor, (begin, itemsize) in tensors.items()
            for rows, position in owned.get(tensor, ())
        ]
        # Every rank checks the headers: with a damaged header, a rank would load bytes outside of its verified chunks.
        header_bytes = min((begin for begin, _ in tensors.values()), default=0)
        indices = set(range(min(whole.record.chunks, -(-header_bytes // whole.record.chunk_bytes))))
        for run in runs:
            indices.update(run.chunks_of(rank, world_size, whole.record))
        for gap in _chunks_between([run.bytes for run in runs], whole.record):
            indices.update(whole.chunks_of(gap, rank, world_size))
        chunks += [(name, index) for index in sorted(indices)]
    return chunks


def _writer(name: str, manifest: Manifest) -> int | None:
    """Returns the rank whose rows a recorded file holds. Further models' files have the same names, in other folders."""
    return rank_of(PurePosixPath(name).name, manifest.world_size)


def _reader(position: float, world_size: int) -> int:
    return min(world_size - 1, int(position * world_size))


def _chunks_between(runs: Iterable[Interval], record: FileRecord) -> Iterator[range]:
    """Yields the ranges of a file's chunks without a byte of the runs."""
    at = 0
    for run in joined_intervals(run for run in runs if run.numel):
        yield range(at, run.start // record.chunk_bytes)
        at = -(-run.stop // record.chunk_bytes)
    yield range(at, record.chunks)


@dataclass(frozen=True, kw_only=True)
class _WholeFile:
    """A file. `first` to `last`: its relative position among the bytes of all ranks, within 0 to 1."""

    record: FileRecord
    first: float
    last: float

    def chunks_of(self, chunks: range, rank: int, world_size: int) -> range:
        """Returns the part of `chunks` for this rank to verify."""

        def reader(index: int) -> int:
            middle = index * self.record.chunk_bytes + self.record.bytes_of(index) // 2
            return _reader(self.first + (self.last - self.first) * middle / max(1, self.record.size), world_size)

        return chunks[bisect_left(chunks, rank, key=reader) : bisect_right(chunks, rank, key=reader)]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The bytes of one tensor in a weights file, and the rows of the parameter's state.

    Attributes:
        begin: the tensor's first byte.
        position: the relative position of the parameter's elements among all parameters' elements, within 0 to 1. A rank writes
            its parts of all parameters in the same order, so a part has about this position in any rank's file.
        writers: the ranks that wrote rows, in order.
    """

    begin: int
    itemsize: int
    rows: SavedRows
    position: tuple[float, float]
    writers: Sequence[int]

    @property
    def bytes(self) -> Interval:
        start, stop = self.rows.cuts.whole
        return Interval(self.begin + start * self.itemsize, self.begin + stop * self.itemsize)

    def chunks_of(self, rank: int, world_size: int, file: FileRecord) -> Iterator[int]:
        """Yields the chunks whose writer's relative position is this rank's."""
        every = range(len(self.rows.ranks))
        first, last = self.position
        # Ranks ascend along the rows, and so do the readers, so bisect finds this rank's rows.
        own = every[
            bisect_left(every, rank, key=lambda index: _reader(self._position(index, last), world_size)) : bisect_right(
                every, rank, key=lambda index: _reader(self._position(index, first), world_size)
            )
        ]
        for index in own:
            start, stop = self.rows.cuts.interval(index)
            begin, end = self.begin + start * self.itemsize, self.begin + stop * self.itemsize
            for chunk in range(begin // file.chunk_bytes, -(-min(end, file.size) // file.chunk_bytes)):
                middle = (max(begin, chunk * file.chunk_bytes) + min(end, (chunk + 1) * file.chunk_bytes)) // 2
                fraction = first + (last - first) * (middle - begin) / max(1, end - begin)
                if _reader(self._position(index, fraction), world_size) == rank:
                    yield chunk

    def _position(self, index: int, fraction: float) -> float:
        return (bisect_left(self.writers, self.rows.ranks[index]) + fraction) / max(1, len(self.writers))


def _whole_files(manifest: Manifest, writers: Sequence[int]) -> dict[str, _WholeFile]:
    """Returns each recorded file's position: the writer's for a rank's row file, otherwise one in proportion to bytes."""
    files: dict[str, _WholeFile] = {}
    numbers = {writer: number for number, writer in enumerate(writers)}
    others = {n: r.size for n, r in sorted(manifest.files.items()) if _writer(n, manifest) is None}
    total, before = max(1, sum(others.values())), 0
    for name, record in sorted(manifest.files.items()):
        writer = _writer(name, manifest)
        if writer is None:
            first, last = before / total, (before + record.size) / total
            before += record.size
        else:
            first, last = numbers[writer] / len(writers), (numbers[writer] + 1) / len(writers)
        files[name] = _WholeFile(record=record, first=first, last=last)
    return files


def _owned_rows(manifest: Manifest, writers: Sequence[int]) -> dict[str, list[tuple[SavedRows, tuple[float, float]]]]:
    """Parameter → the rows of one kind of its state, each with its relative position among all parameters, within 0 to 1."""
    rows = list(_one_kind_of_each(manifest)) if writers else []
    total, before = max(1, sum(each.cuts.whole.numel for each in rows)), 0
    found: dict[str, list[tuple[SavedRows, tuple[float, float]]]] = {}
    for each in rows:
        first, before = before, before + each.cuts.whole.numel
        found.setdefault(each.name, []).append((each, (first / total, before / total)))
    return found


def _one_kind_of_each(manifest: Manifest) -> Iterator[SavedRows]:
    """Yields, for each parameter, the rows of one kind of state with one value per element."""
    kind_of = {
        name: next((kind for kind in kinds if kind not in manifest.own_shapes.get(name, {})), None)
        for name, kinds in manifest.kinds.items()
    }
    for rows in manifest.rows:
        if rows.kind == kind_of.get(rows.name, WEIGHTS) and rows.cuts.whole.numel:
            yield rows
