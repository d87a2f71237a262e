"""Which rank looks at which part of a checkpoint's files: the one that is about to load it, where that can be foreseen.

[Note: whoever loads it checks it]
A resume reads a checkpoint twice: to see that it is good, before anything else, and to load it. Ranks of one host share what
the system has read, ranks of several do not. So a rank's file in `zero/` is looked at by the rank that stands where its
writer stood, and a part of a weights file by the rank that stands where the owner of that parameter's state stood. On as many
ranks and at the same stage as before, these are the bytes that a rank loads. Otherwise it is a guess, which costs reading and
nothing else: every byte is some rank's in any case.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .format.files import CHUNK_BYTES, Chunk, chunks_in
from .format.headers import tensors_in
from .format.manifest import WEIGHTS, Manifest, SavedRow


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Bytes of a file, and where they stand among all that the ranks have written, from 0 to 1."""

    begin: int
    end: int
    first: float
    last: float

    def position(self, at: int) -> float:
        return self.first + (self.last - self.first) * (at - self.begin) / max(1, self.end - self.begin)


def own_chunks(root: Path, manifest: Manifest, *, rank: int, world_size: int) -> list[Chunk]:
    """The chunks of a checkpoint's recorded files that one of `world_size` ranks looks at.

    Several look at a chunk of which each will load a part, and all at the headers of safetensors files.

    Args:
        root: the checkpoint.
    """
    owned = _owned_runs(manifest)
    chunks = []
    for name, whole in _whole_runs(manifest).items():
        tensors = tensors_in(root / name) if name.endswith(".safetensors") else {}
        runs = sorted(
            (
                _Run(begin=begin + run.begin * itemsize, end=begin + run.end * itemsize, first=run.first, last=run.last)
                for tensor, (begin, itemsize) in tensors.items()
                for run in owned.get(tensor, ())
            ),
            key=lambda run: run.begin,
        )
        begins, ends = [run.begin for run in runs], [run.end for run in runs]
        header_bytes = min((begin for begin, _ in tensors.values()), default=0)
        for index in range(chunks_in(whole.end)):
            begin, end = index * CHUNK_BYTES, min(whole.end, (index + 1) * CHUNK_BYTES)
            inside = runs[bisect_right(ends, begin) : bisect_left(begins, end)] or [whole]
            positions = [run.position((max(begin, run.begin) + min(end, run.end)) // 2) for run in inside]
            readers = {min(world_size - 1, int(position * world_size)) for position in positions}
            if rank in readers or begin < header_bytes:
                chunks.append((name, index))
    return chunks


def _whole_runs(manifest: Manifest) -> dict[str, _Run]:
    """Each file as one run: of a writer's place where a rank has written its rows there, else by its bytes."""
    writers = sorted({row.file for row in manifest.rows})
    runs: dict[str, _Run] = {}
    others = {n: r.size for n, r in sorted(manifest.files.items()) if PurePosixPath(n).name not in writers}
    total, before = max(1, sum(others.values())), 0
    for name, record in sorted(manifest.files.items()):
        if name in others:
            first, last = before / total, (before + record.size) / total
            before += record.size
        else:
            number = writers.index(PurePosixPath(name).name)
            first, last = number / len(writers), (number + 1) / len(writers)
        runs[name] = _Run(begin=0, end=record.size, first=first, last=last)
    return runs


def _owned_runs(manifest: Manifest) -> dict[str, list[_Run]]:
    """Parameter → runs of its elements, each where the rank stands that had their state."""
    writers = sorted({row.file for row in manifest.rows})
    numels = dict.fromkeys(writers, 0)
    rows = list(_one_kind_of_each(manifest))
    for row in rows:
        numels[row.file] += row.interval.numel
    before = dict.fromkeys(writers, 0)
    runs: dict[str, list[_Run]] = {}
    for row in rows:
        start, number = before[row.file], writers.index(row.file)
        before[row.file] += row.interval.numel
        first, last = ((number + at / numels[row.file]) / len(writers) for at in (start, before[row.file]))
        runs.setdefault(row.name, []).append(
            _Run(begin=row.interval.start, end=row.interval.stop, first=first, last=last)
        )
    return runs


def _one_kind_of_each(manifest: Manifest) -> Iterator[SavedRow]:
    """Rows of a state that has one value an element of its parameter."""
    kind_of = {
        name: next((kind for kind in kinds if kind not in manifest.own_shapes.get(name, {})), None)
        for name, kinds in manifest.kinds.items()
    }
    for row in manifest.rows:
        if row.kind == kind_of.get(row.name, WEIGHTS) and row.interval.numel:
            yield row
