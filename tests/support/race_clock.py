"""Vector clocks over a trace of the stand-in device (standin_trace.cpp): finds unordered accesses and reuses of memory.

Each stream, communicator and thread is an actor with its own clock: for each actor, the number of its entries before the
present action. Two accesses, at least one of them a write, are ordered if the clock of the later includes the earlier. On a GPU,
unordered accesses may happen in any order, regardless of their order here.

Freed memory may be reallocated by the next allocation on its stream, as with torch's caching allocator, unless `record_stream`
has named the streams still using it. Unpinned memory may be reallocated at once.
"""

import re
import weakref
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from hf_zero import pinned_memory
from hf_zero.checkpoint import live_pieces
from hf_zero.offload import copies, walk
from hf_zero.offload.files import AlignedFile
from hf_zero.pinned_memory import PinnedPool
from hf_zero.presence import diagnosis
from hf_zero.stage3 import edits

SCRIPT = "script"
"""The actor of the main thread and of autograd's thread, one of which waits for the other."""

# Host waits for the device which order nothing here: waits requested by a script or a model (outside of the package's functions),
# because not every script has them; and waits of the search for unseen edits, because later steps do not search.
_SEARCH = (edits.UnseenEdits.begin, edits.UnseenEdits.refuse, edits.refuse_unseen_edits)
NOT_RELIED_ON = re.compile(
    rf"{re.escape(Path(edits.__file__).name)}:\d+ ({'|'.join(each.__name__ for each in _SEARCH)})\b"
)


class Clock(dict[str, int]):
    """Actor → number of entries."""

    def join(self, other: dict[str, int]) -> None:
        for actor, time in other.items():
            if time > self.get(actor, 0):
                self[actor] = time


class Entry(NamedTuple):
    """An entry of standin_trace.cpp."""

    thread: int
    kind: str
    actor: str
    id: str
    accesses: list[tuple[int, int, bool]]
    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.name or self.kind} at {self.where or 'the script'}"


class Block:
    """Memory of a device, or pinned memory of the host.

    Attributes:
        owner: the stream of its allocation; None for pinned memory.
        kept_for: streams named by `record_stream`.
        latest: (begin, end, whether it writes, actor) → time and entry of the last such access.
    """

    def __init__(self, begin: int, end: int, owner: str | None, *, is_torchs: bool):
        self.begin, self.end, self.owner, self.is_torchs = begin, end, owner, is_torchs
        self.kept_for: set[str] = set()
        self.latest: dict[tuple[int, int, bool, str], tuple[int, Entry]] = {}


class Races:
    """Processes the entries of a trace in their order.

    Attributes:
        found: unordered accesses, as text, and their number.
        counts: entries by kind.
    """

    def __init__(self, entries: Iterator[tuple]):
        self.found: dict[str, int] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self._clocks: dict[str, Clock] = defaultdict(Clock)
        self._given: dict[str, Clock] = {}
        self._workers: set[int] = set()
        self._blocks: dict[int, Block] = {}
        self._begins: list[int] = []
        self._freed: dict[str, list[tuple[str, int, Entry, Entry]]] = defaultdict(list)
        for entry in map(Entry._make, entries):
            self.counts[entry.kind] += 1
            thread = f"thread {entry.thread}" if entry.thread in self._workers else SCRIPT
            actor = entry.actor or thread
            self._tick(thread)
            if actor != thread:
                # Work queued on a stream runs after all earlier actions of the host.
                self._clocks[actor].join(self._clocks[thread])
                self._tick(actor)
            getattr(self, f"_{entry.kind}")(entry, actor)

    def _tick(self, actor: str) -> None:
        clock = self._clocks[actor]
        clock[actor] = clock.get(actor, 0) + 1

    # ---- order ----

    def _worker(self, entry: Entry, _actor: str) -> None:
        self._workers.add(entry.thread)

    def _give(self, entry: Entry, actor: str) -> None:
        self._given[entry.id] = Clock(self._clocks[actor])

    def _take(self, entry: Entry, actor: str) -> None:
        if _counts(entry):
            self._clocks[actor].join(self._given.get(entry.id, {}))

    def _join(self, entry: Entry, actor: str) -> None:
        for other in [entry.id] if entry.id else [each for each in self._clocks if each.startswith(("stream", "comm"))]:
            if _counts(entry):
                self._clocks[actor].join(self._clocks[other])

    # ---- memory ----

    def _do(self, entry: Entry, actor: str) -> None:
        clock = self._clocks[actor]
        for begin, end, writes in entry.accesses:
            block = self._block_of(begin)
            if block is None:
                continue
            covered = []
            for key, (time, earlier) in block.latest.items():
                first, last, wrote, other = key
                if other == actor or first >= end or begin >= last:
                    continue
                if clock.get(other, 0) >= time:
                    # Actions after this write are also after the accesses it covers.
                    if writes and begin <= first and last <= end:
                        covered.append(key)
                elif writes or wrote:
                    self._report("unordered", earlier, entry)
            for key in covered:
                del block.latest[key]
            block.latest[begin, end, writes, actor] = clock[actor], entry

    def _allocate(self, entry: Entry, actor: str) -> None:
        clock = self._clocks[actor]
        for other, time, used, freed in self._freed.pop(actor, ()):
            if clock.get(other, 0) < time:
                self._report(f"given out again, since it was freed ({freed})", used, entry)
        self._add(entry, actor)

    def _pin(self, entry: Entry, _actor: str) -> None:
        self._add(entry, None)

    def _add(self, entry: Entry, owner: str | None) -> None:
        begin, end, _ = entry.accesses[0]
        if begin not in self._blocks:
            insort(self._begins, begin)
        self._blocks[begin] = Block(begin, end, owner, is_torchs=entry.id == "torch")

    def _keep(self, entry: Entry, actor: str) -> None:
        block = self._block_of(entry.accesses[0][0])
        if block is not None:
            block.kept_for.add(actor)

    def _free(self, entry: Entry, _actor: str) -> None:
        block = self._remove(entry)
        if block is None or block.owner is None:
            return
        for (*_, other), (time, used) in block.latest.items():
            if other != block.owner and other not in block.kept_for:
                self._freed[block.owner].append((other, time, used, entry))

    def _unpin(self, entry: Entry, actor: str) -> None:
        block = self._remove(entry)
        for (*_, other), (time, used) in block.latest.items() if block is not None and not block.is_torchs else ():
            # Threads hold references to pinned and unpinned memory they use.
            if other.startswith("stream") and self._clocks[actor].get(other, 0) < time:
                self._report("unpinned", used, entry)

    def _drop(self, entry: Entry, actor: str) -> None:
        """The last view of memory is dropped, so the drop is after all accesses by threads."""
        block = self._block_of(entry.accesses[0][0])
        for (*_, other), (time, _) in block.latest.items() if block is not None else ():
            if not other.startswith(("stream", "comm")):
                self._clocks[actor].join({other: time})

    def _remove(self, entry: Entry) -> Block | None:
        block = self._blocks.pop(entry.accesses[0][0], None)
        if block is not None:
            self._begins.remove(block.begin)
        return block

    def _block_of(self, address: int) -> Block | None:
        place = bisect_right(self._begins, address) - 1
        block = self._blocks[self._begins[place]] if place >= 0 else None
        return block if block is not None and address < block.end else None

    def _report(self, what: str, first: Entry, second: Entry) -> None:
        text = f"{what}: {first}\n    and {second}"
        self.found[text] = self.found.get(text, 0) + 1


def _counts(entry: Entry) -> bool:
    """Whether an entry may establish an order: all entries, except some host waits for the device."""
    if entry.actor or entry.id.startswith(_HAND_OVER):
        return True
    return entry.where != "" and NOT_RELIED_ON.search(entry.where) is None


# ---- hand-overs between threads ----

_HAND_OVER = "hand-over "


@contextmanager
def traced(compiled, package: str) -> Iterator[list[tuple]]:
    """Fills the list with the trace of the block."""
    found: list[tuple] = []
    with ExitStack() as stack:
        compiled.start_trace(package)
        stack.callback(lambda: found.extend(compiled.end_trace()))
        _follow_threads(stack, compiled.note)
        _follow_memory(stack, compiled.note)
        yield found


def _follow_threads(stack: ExitStack, note: Callable) -> None:
    """Notes that a thread's actions before a hand-over are before the receiver's actions after it."""
    numbers = count()
    # Address of a pool's memory → the hand-over of the thread which dropped the last view.
    dropped: dict[int, str] = {}

    def give() -> str:
        id = f"{_HAND_OVER}{next(numbers)}"
        note("give", id)
        return id

    def take(id: str | None) -> None:
        if id is not None:
            note("take", id)

    def submit(self: ThreadPoolExecutor, call: Callable, *arguments, **named) -> Future:
        begin, ends = give(), []

        def handed():
            take(begin)
            try:
                return call(*arguments, **named)
            finally:
                ends.append(give())

        future = stock_submit(self, handed)
        future.ends = ends
        return future

    def take_end(future: Future) -> None:
        for id in getattr(future, "ends", ()):
            take(id)

    def result(self: Future, *arguments):
        try:
            return stock_result(self, *arguments)
        finally:
            take_end(self)

    def exception(self: Future, *arguments):
        try:
            return stock_exception(self, *arguments)
        finally:
            take_end(self)

    def wait_for(futures, *arguments):
        futures = list(futures)
        done = wait(futures, *arguments)
        for future in futures:
            take_end(future)
        return done

    def start(self: Thread) -> None:
        self.begin = give()
        stock_start(self)

    def run(self: Thread) -> None:
        note("worker")
        take(self.begin)
        stock_run(self)
        self.end = give()

    def join(self: Thread, *arguments) -> None:
        stock_join(self, *arguments)
        take(getattr(self, "end", None))

    class HandedLock:
        """A lock whose next holder is ordered after its last holder."""

        def __init__(self) -> None:
            self._lock, self.last = Lock(), None

        def __enter__(self) -> None:
            self._lock.acquire()
            take(self.last)

        def __exit__(self, *_: object) -> None:
            self.last = give()
            self._lock.release()

    def finalize(views: object, call: Callable, memory, *arguments) -> object:
        def handed() -> None:
            note("drop", "", memory.data_ptr(), 1, False)
            dropped[memory.data_ptr()] = give()
            call(memory, *arguments)

        return stock_finalize(views, handed)

    def take_pinned(self: PinnedPool, nbytes: int):
        found = stock_take(self, nbytes)
        take(dropped.get(found.data_ptr()))
        return found

    def secure(self: live_pieces.LivePieces) -> None:
        # If everything is written already, a flag orders the threads.
        stock_secure(self)
        take(self._lock.last)

    stock_submit, stock_result, stock_exception = ThreadPoolExecutor.submit, Future.result, Future.exception
    stock_start, stock_run, stock_join = Thread.start, Thread.run, Thread.join
    stock_secure, stock_take, stock_finalize = live_pieces.LivePieces.secure, PinnedPool.take, weakref.finalize
    for owner, name, instead in (
        (ThreadPoolExecutor, "submit", submit),
        (Future, "result", result),
        (Future, "exception", exception),
        (walk, "wait", wait_for),
        (Thread, "start", start),
        (Thread, "run", run),
        (Thread, "join", join),
        (copies, "Lock", HandedLock),
        (live_pieces, "threading", SimpleNamespace(Lock=HandedLock)),
        (live_pieces.LivePieces, "secure", secure),
        (pinned_memory, "weakref", SimpleNamespace(finalize=finalize)),
        (PinnedPool, "take", take_pinned),
        # The watchdog holds frames of the main thread for a moment. If a frame ends during this time, its memory is freed in the
        # watchdog's thread. This happens after all waits of the main thread, but no hand-over shows the order in the trace.
        (diagnosis, "script_frame", lambda: (None, None)),
    ):
        stack.enter_context(mock.patch.object(owner, name, instead))


def _follow_memory(stack: ExitStack, note: Callable) -> None:
    """Notes accesses of host memory by file reads and writes."""

    def read(self: AlignedFile, buffer, offset: int) -> None:
        note("do", "", buffer.data_ptr(), buffer.nbytes, True)
        stock_read(self, buffer, offset)

    def write(self: AlignedFile, buffer, offset: int) -> None:
        note("do", "", buffer.data_ptr(), buffer.nbytes, False)
        stock_write(self, buffer, offset)

    def write_piece(self: live_pieces.Piece) -> None:
        note("do", "", self.values.detach().data_ptr(), self.nbytes, False)
        stock_write_piece(self)

    stock_read, stock_write, stock_write_piece = AlignedFile.read, AlignedFile.write, live_pieces.Piece.write
    for owner, name, instead in (
        (AlignedFile, "read", read),
        (AlignedFile, "write", write),
        (live_pieces.Piece, "write", write_piece),
    ):
        stack.enter_context(mock.patch.object(owner, name, instead))
