"""Checkpoints in the nodes' host memory: each node's part also on the next node, so that the loss of one loses nothing.

They lie in files of /dev/shm, which outlive the workers and go with the node. A generation is a checkpoint folder of layout
`sharded`, committed as those on a disk are: there whole or not at all, with a checksum for each part of each file. The one before
stays until the next but one is there.
"""

import json
import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.folder.commit import clear_leftovers
from ...checkpoint.folder.disks import find_disk
from ...checkpoint.folder.on_all_ranks import on_all_ranks
from ...checkpoint.format.files import FileRecord, chunks_in, faults_of
from ...checkpoint.format.manifest import MANIFEST_NAME, CheckpointError, Manifest
from ...checkpoint.verify import newest_first, step_of
from ...comm.all_or_none import Exchange
from ...comm.peers.file_server import Address, FileServer, fetch_file
from ..checkpoints.checkpointing import ZERO_FOLDER

MEMORY = Path("/dev/shm")
"""Where the system keeps files in memory, on each node."""

GENERATIONS = 2

_MARK = ".hf_zero.memory"
_OWNER = "owner.json"
_THEN = "Training and the checkpoints on the disk are as they were."
_MANIFEST = f"{ZERO_FOLDER}/{MANIFEST_NAME}"

Records = Mapping[str, FileRecord]


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What a node has of a generation: its good files, and all that the generation has, as far as it knows."""

    good: Records
    row_files: frozenset[str]


class NodeMemory:
    """The generations of one run. Made on all ranks, which share what they find.

    Args:
        output_dir: of the run: another one has a memory of its own, and so has this after it was emptied.

    Attributes:
        folder: in which this node's generations lie.
        disk: the ranks of this node.
    """

    def __init__(self, output_dir: Path, exchange: Exchange, rank: int):
        marks = exchange(_marked(output_dir))
        self._mark = next((mark for mark in marks if mark), None) or exchange(uuid.uuid4().hex)[0]
        self._output_dir, self._exchange, self._rank = output_dir, exchange, rank
        self.folder = MEMORY / f"hf_zero-{self._mark}"
        self.disk = find_disk(self.folder, rank, exchange, then=_THEN)
        on_all_ranks(exchange, self._own_folder, doing=f"keep shards in {self.folder}", then=_THEN)
        self._server = FileServer(self.folder, self._mark)
        self._addresses: list[Address] = exchange(self._server.address)
        self._nodes: list[tuple[int, ...]] = sorted(set(exchange(self.disk.ranks)))
        self._found: dict[int, dict[int, _Held]] = {}

    @property
    def has_neighbours(self) -> bool:
        return len(self._nodes) > 1

    def _own_folder(self) -> None:
        if not self.disk.leads:
            return
        output_dir = self._output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / _MARK).write_text(self._mark)
        for other in self.folder.parent.glob("hf_zero-*"):
            # Of a run in this output_dir that was ended for good.
            if other != self.folder and _owner_of(other) == str(output_dir.resolve()):
                shutil.rmtree(other, ignore_errors=True)
        (self.folder / _OWNER).write_text(json.dumps({"output_dir": str(output_dir.resolve())}))
        clear_leftovers(self.folder)

    # ---- a new generation ----

    def share(self, temporary: Path, exchange: Exchange) -> None:
        """Fetches what the node before this one has of a sealed generation, and vouches for it. Collective.

        Raises:
            CheckpointError: on every rank, when one could not.
        """
        before = self._nodes[self._nodes.index(self.disk.ranks) - 1]
        manifest = Manifest.read(temporary / ZERO_FOLDER)
        files = exchange(dict(manifest.files) if self.disk.leads else None)
        wanted = {name: record for name, record in (files[before[0]] or {}).items() if name not in manifest.files}
        own = [name for place, name in enumerate(sorted(wanted)) if place % len(self.disk.ranks) == self.disk.place]
        address = self._addresses[before[self.disk.place % len(before)]]

        def fetch() -> None:
            self._fetch(temporary, {name: wanted[name] for name in own}, [address] * len(own))

        on_all_ranks(exchange, fetch, doing=f"fetch shards of ranks {list(before)}", then=_THEN)

        def vouch() -> None:
            if self.disk.leads:
                _vouch(manifest, {**manifest.files, **wanted}, temporary)

        on_all_ranks(exchange, vouch, doing=f"write the manifest of {temporary}", then=_THEN)

    # ---- after a restart ----

    def newest(self) -> int | None:
        """The step of the newest generation that the nodes have all of between them. Collective."""
        everyones = self._exchange(self._held() if self.disk.leads else {})
        steps = sorted({step for held in everyones for step in held}, reverse=True)
        self._found = {step: {r: held[step] for r, held in enumerate(everyones) if step in held} for step in steps}
        return next((step for step in steps if self._is_whole(step)), None)

    def gathered(self, step: int) -> Path:
        """The folder of a generation that `newest` has found, with all its files on each node. Collective.

        Raises:
            CheckpointError: on every rank, when a node has no room for it or cannot be reached.
        """
        began_s, holders, final = time.perf_counter(), self._found[step], self.folder / f"checkpoint-{step}"
        source = {name: rank for rank, held in sorted(holders.items(), reverse=True) for name in held.good}
        records = {name: holders[rank].good[name] for name, rank in source.items()}
        mine = holders[self._rank].good if self._rank in holders else {}
        missing = {name: record for name, record in records.items() if name not in mine} if self.disk.leads else {}

        def fetch() -> int:
            needed, free = sum(record.size for record in missing.values()), shutil.disk_usage(self.folder).free
            if needed > free:
                raise CheckpointError(f"{self.folder} has room for {free} bytes, and {needed} are on other nodes")
            self._fetch(final, missing, [self._addresses[source[name]] for name in missing])
            if missing:
                if not (final / _MANIFEST).is_file():
                    fetch_file(self._addresses[min(holders)], f"{final.name}/{_MANIFEST}", final / _MANIFEST)
                _vouch(Manifest.read(final / ZERO_FOLDER), records, final)
            return needed

        fetched = on_all_ranks(self._exchange, fetch, doing=f"fetch {final.name} from other nodes", then=_THEN)
        if self._rank == 0:
            print(
                f"hf_zero: {final.name} comes from the nodes' memory: {max(fetched) / 2**20:.1f} MiB fetched from other nodes in "
                f"{time.perf_counter() - began_s:.2f} s, and nothing read from a disk.",
                file=sys.stderr,
                flush=True,
            )
        return final

    def close(self, *, is_over: bool) -> None:
        """Ends the service. Where the run is over, its memory is given back."""
        self._server.close()
        if is_over and self.disk.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            (self._output_dir / _MARK).unlink(missing_ok=True)

    def _fetch(self, folder: Path, wanted: Records, addresses: Sequence[Address]) -> None:
        for (name, record), address in zip(wanted.items(), addresses):
            fetch_file(address, f"{folder.name}/{name}", folder / name)
            faults = faults_of(folder, {name: record}, [(name, index) for index in range(chunks_in(record.size))])
            if faults:
                raise CheckpointError(f"{faults[0]} after it was fetched from {address.host}")

    def _held(self) -> dict[int, _Held]:
        """Of each generation of this node, what is as it was written."""
        held = {}
        for path in newest_first(self.folder):
            try:
                manifest = Manifest.read(path / ZERO_FOLDER)
            except CheckpointError:
                continue
            good = {name: record for name, record in manifest.files.items() if not _faults_of(path, name, record)}
            row_files = frozenset(f"{ZERO_FOLDER}/{row.file}" for row in manifest.rows)
            held[step_of(path)] = _Held(good=good, row_files=row_files)
        return held

    def _is_whole(self, step: int) -> bool:
        holders = self._found[step].values()
        good = {name for held in holders for name in held.good}
        return all(held.row_files <= good for held in holders)


def _faults_of(path: Path, name: str, record: FileRecord) -> list[str]:
    return faults_of(path, {name: record}, [(name, index) for index in range(chunks_in(record.size))])


def _vouch(manifest: Manifest, files: Records, folder: Path) -> None:
    elsewhere = tuple(name for name in manifest.elsewhere if f"{ZERO_FOLDER}/{name}" not in files)
    replace(manifest.with_files(files), elsewhere=elsewhere).write(folder / ZERO_FOLDER)


def _marked(output_dir: Path) -> str | None:
    mark = output_dir / _MARK
    text = mark.read_text() if mark.is_file() else ""
    return text if len(text) == 32 and text.isalnum() else None


def _owner_of(folder: Path) -> str | None:
    try:
        return json.loads((folder / _OWNER).read_text())["output_dir"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
