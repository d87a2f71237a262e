"""What the short suite is made of, and what its tests cost."""

import logging
import sys
import time

from cells import examples, short_of, short_rows
from cpu_times import cpu_seconds
from ranks import run_ranks

SECONDS_A_RANK = 0.2


def busy(rank: int, world_size: int) -> None:
    until = time.process_time() + SECONDS_A_RANK
    while time.process_time() < until:
        pass


def test_what_ranks_compute_is_counted_to_the_test_that_starts_them():
    before = cpu_seconds()
    run_ranks(busy, world_size=2, time_limit_s=60)
    assert cpu_seconds() - before >= 2 * SECONDS_A_RANK


def test_cells_that_are_not_named_are_slow_and_none_is_lost():
    first, second = short_of([1, 2], [2])
    assert (first.values, [mark.name for mark in first.marks], second) == ((1,), ["slow"], 2)
    first, second = short_rows([(1, "a"), (2, "b")], [(2, "b")])
    assert (first.values, [mark.name for mark in first.marks], second) == ((1, "a"), ["slow"], (2, "b"))
    assert examples(10).max_examples >= 5


def as_new(rank: int, world_size: int) -> tuple[bool, int, int, list]:
    return __name__ in sys.modules, sys.stdout.fileno(), sys.stderr.fileno(), logging.root.handlers


def test_ranks_have_what_the_tests_have_imported_and_nothing_of_pytests_output():
    assert run_ranks(as_new, world_size=2, time_limit_s=60) == [(True, 1, 2, [])] * 2
