"""Collectives of several steps: one order of all steps on every rank, whichever result it needs first."""

from contextlib import contextmanager

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.ledger import Label, Ledger
from hf_zero.comm.transport import Handle, StepsInOrder
from hf_zero.device import SideQueue, queue_end


def log_of(step_counts: list[int], needed_after: list[list[int]]) -> list[tuple[str, int, int]]:
    """What a rank starts and waits for, in its order: ("start" or "wait", collective, step).

    Args:
        step_counts: of each collective.
        needed_after: which results the rank needs behind the beginning of each, by their place among those begun.
    """
    log: list[tuple[str, int, int]] = []
    ledger, order, finishes = Ledger(), StepsInOrder(), []

    def start(collective: int, step: int) -> Handle:
        log.append(("start", collective, step))
        label = Label(kind="a step", subject=str(collective))
        return Handle(label, ledger, lambda: log.append(("wait", collective, step)))

    for collective, steps in enumerate(step_counts):
        starts = [lambda step=step, collective=collective: start(collective, step) for step in range(steps)]
        finishes.append(order.begin(*starts))
        for needed in needed_after[collective]:
            finishes[needed % len(finishes)]()
    for finish in finishes:
        finish()
        finish()
    return log


NEEDED = st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=8, max_size=8)


@given(step_counts=st.lists(st.integers(1, 4), min_size=1, max_size=8), mine=NEEDED, theirs=NEEDED)
def test_steps_start_in_one_order_whatever_is_needed_first(step_counts, mine, theirs):
    every = sorted((collective, step) for collective, steps in enumerate(step_counts) for step in range(steps))
    for needed in (mine, theirs):
        log = log_of(step_counts, needed)
        started = [(collective, step) for what, collective, step in log if what == "start"]
        # Nothing is left out, and first steps come as the collectives do, which is as all ranks begin them.
        assert sorted(started) == every
        assert [c for c, step in started if step == 0] == list(range(len(step_counts)))
        assert [each for each in started if each[1]] == [each for each in every if each[1]]
        waited = [(collective, step) for what, collective, step in log if what == "wait"]
        assert sorted(waited) == every
        for collective, step in every:
            if step:
                assert log.index(("wait", collective, step - 1)) < log.index(("start", collective, step))


def test_all_but_the_last_run_on_behind_what_begins_later():
    log = log_of([3, 3, 3, 3], [[], [], [], []])
    begun = log.index(("start", 3, 0))
    assert log.index(("start", 0, 2)) < begun and log.index(("start", 1, 1)) < begun
    assert ("wait", 0, 2) not in log[:begun]


class Beside(SideQueue):
    """Tells whether the host is inside `aside`."""

    def __init__(self):
        self.is_inside = False

    @contextmanager
    def aside(self, *, behind=None):
        self.is_inside = True
        yield
        self.is_inside = False

    def mark(self):
        return queue_end(torch.device("cpu"))


def test_later_steps_wait_in_a_queue_of_their_own_and_only_the_result_is_a_wait_that_counts():
    log: list[tuple[str, int, bool]] = []
    ledger, order, queue = Ledger(), StepsInOrder(), Beside()

    def start(step: int) -> Handle:
        log.append(("start", step, queue.is_inside))
        label = Label(kind=f"step {step}", subject="a bucket")
        ledger.count(label, 4, 0)
        return Handle(label, ledger, lambda: log.append(("wait", step, queue.is_inside)))

    order.begin(lambda: start(0), lambda: start(1), queue=queue)()
    assert log == [("start", 0, False), ("wait", 0, True), ("start", 1, True), ("wait", 1, False)]
    waits = {row.kind: row.wait_seconds for row in ledger.rows()}
    assert waits["step 0"] == 0.0 < waits["step 1"]
    assert all(row.under_way_seconds > 0 for row in ledger.rows())
