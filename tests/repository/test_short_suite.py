"""What the short suite is made of, and what its tests cost."""

import logging
import sys
import time
from pathlib import Path

import pytest
import rank_server
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


def began(rank: int, world_size: int) -> tuple[bytes, int, int, list[logging.Handler]]:
    """The command that this process began with, where it says what it says, and who hears what is logged."""
    return Path("/proc/self/cmdline").read_bytes(), sys.stdout.fileno(), sys.stderr.fileno(), logging.root.handlers


@pytest.mark.skipif(not rank_server.can_serve(), reason="ranks are forked from a new interpreter")
def test_ranks_are_copies_of_this_process_and_have_nothing_of_pytests_output():
    command = Path("/proc/self/cmdline").read_bytes()
    assert run_ranks(began, world_size=2, time_limit_s=60) == [(command, 1, 2, [])] * 2
