"""What communication cost: waits by the clock of the device that trains, read without stopping it."""

import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.ledger import CommRow, Label, Ledger
from hf_zero.comm.transport import Handle
from hf_zero.device import Moment, clock

GATHER, REDUCE = (
    Label(kind=kind, subject="bucket 0") for kind in ("all-gather parameters", "reduce-scatter gradients")
)


class Queue:
    """A device that does in its own time what the host has asked of it."""

    def __init__(self):
        self.asked_s = 0.0
        self.done_s = -1.0

    def ask(self, seconds: float) -> None:
        """Work, or a wait, that the device will be busy with for so long."""
        self.asked_s += seconds

    def catch_up(self) -> None:
        self.done_s = self.asked_s

    def now(self) -> "Place":
        return Place(self)


class Place(Moment):
    """The end of what a queue has been asked for so far."""

    def __init__(self, queue: Queue):
        self._queue, self._seconds = queue, queue.asked_s

    @property
    def is_past(self) -> bool:
        return self._seconds <= self._queue.done_s

    def seconds_until(self, later: "Place") -> float:
        assert self.is_past and later.is_past, "read before the device was there"
        return later._seconds - self._seconds


def row_of(ledger: Ledger, label: Label) -> CommRow:
    [row] = [row for row in ledger.rows() if row.kind == label.kind]
    return row


def test_a_wait_is_what_the_devices_queue_stood_still_and_is_known_once_it_has_passed_it():
    queue = Queue()
    ledger = Ledger(queue.now)
    ledger.count(GATHER, 6_000_000_000, 0)
    handle = Handle(GATHER, ledger, lambda: queue.ask(2.0))
    queue.ask(1.0)
    handle.finish()
    assert row_of(ledger, GATHER).wait_seconds == 0
    queue.catch_up()
    found = row_of(ledger, GATHER)
    assert (found.wait_seconds, found.under_way_seconds, found.gb_per_second) == (2.0, 3.0, 2.0)


@given(
    st.lists(
        st.tuples(st.sampled_from([GATHER, REDUCE]), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=12
    )
)
def test_waits_add_up_by_kind_whenever_the_device_gets_there(collectives):
    queue = Queue()
    ledger = Ledger(queue.now)
    waited = {GATHER.kind: 0.0, REDUCE.kind: 0.0}
    for label, works, waits, catches_up in collectives:
        ledger.count(label, 1, 0)
        handle = Handle(label, ledger, lambda waits=waits: queue.ask(waits))
        queue.ask(works)
        handle.finish()
        waited[label.kind] += waits
        if catches_up:
            queue.catch_up()
            assert sum(row.wait_seconds for row in ledger.rows()) == sum(waited.values())
    queue.catch_up()
    assert {row.kind: row.wait_seconds for row in ledger.rows()} == {
        k: waited[k] for k in {c[0].kind for c in collectives}
    }


def test_a_collective_made_of_others_waits_once_and_is_under_way_in_both():
    queue = Queue()
    ledger = Ledger(queue.now)
    ledger.count(GATHER, 1, 0)
    ledger.count(REDUCE, 1, 0)
    inner = Handle(GATHER, ledger, lambda: queue.ask(2.0))
    Handle(REDUCE, ledger, inner.finish).finish()
    queue.catch_up()
    assert row_of(ledger, REDUCE).wait_seconds == 2.0 and row_of(ledger, GATHER).wait_seconds == 0.0
    assert row_of(ledger, GATHER).under_way_seconds == row_of(ledger, REDUCE).under_way_seconds == 2.0


def test_times_begin_with_the_first_question_and_bytes_with_the_first_collective():
    queue, asked = Queue(), []

    def now() -> Place:
        asked.append(queue.asked_s)
        return queue.now()

    ledger = Ledger(now, is_timed=False)

    def started(numbytes: int) -> Handle:
        ledger.count(GATHER, numbytes, 0)
        return Handle(GATHER, ledger, lambda: queue.ask(1.0))

    started(1_000_000_000).finish()
    earlier = started(1_000_000_000)
    assert not asked and ledger.timed_from is None
    ledger.watch.log.step = 7
    ledger.start_timing()
    # One more of a kind of which one is under way that nobody has timed.
    later = started(1_000_000_000)
    earlier.finish()
    later.finish()
    started(4_000_000_000).finish()
    queue.catch_up()
    found = row_of(ledger, GATHER)
    assert (found.calls, found.bytes_sent, ledger.timed_from) == (4, 7_000_000_000, 7)
    assert (found.wait_seconds, found.under_way_seconds, found.gb_per_second) == (3.0, 1.0, 4.0)
    # The end of a wait is the end of what was under way.
    assert len(asked) == 2 + 2 + 3


def test_on_the_host_a_wait_is_wall_time_and_known_at_once():
    ledger = Ledger(clock(torch.device("cpu")))
    ledger.count(GATHER, 1, 0)
    began_s = time.perf_counter()
    Handle(GATHER, ledger, lambda: time.sleep(0.05)).finish()
    assert 0.05 <= row_of(ledger, GATHER).wait_seconds <= time.perf_counter() - began_s
