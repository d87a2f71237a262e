"""How ranks are started, heard, ended and counted."""

import logging
import os
import sys
import time
from pathlib import Path

import pytest
import rank_server
import torch
import torch.distributed as dist
from cells import examples, short_of, short_rows
from cpu_times import cpu_seconds
from harness import tcp_bytes
from ranks import RankFailedError, RanksTimedOutError, run_ranks

TIME_LIMIT_S = 60


def exchange_bytes(rank: int, world_size: int, *, numel: int) -> dict[str, int]:
    tensor = torch.full((numel,), float(rank))
    dist.barrier()
    before = tcp_bytes()
    if rank == 0:
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
    dist.barrier()
    after = tcp_bytes()
    # A rank that leaves closes its sockets, and what they have counted is gone on both sides.
    dist.barrier()
    return {"rank": rank, "sent": after.sent - before.sent, "received": after.received - before.received}


def test_ranks_bring_back_results_and_gloo_bytes_are_counted():
    sender, receiver = run_ranks(
        exchange_bytes, world_size=2, time_limit_s=TIME_LIMIT_S, keyword_arguments={"numel": 250_000}
    )
    assert (sender["rank"], receiver["rank"]) == (0, 1)
    payload_bytes = 1_000_000
    framing_bytes = 1_000
    assert payload_bytes <= sender["sent"] <= payload_bytes + framing_bytes
    assert payload_bytes <= receiver["received"] <= payload_bytes + framing_bytes


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason in words")
    dist.barrier()


def test_a_failing_rank_takes_the_others_down_with_its_traceback():
    started_s = time.monotonic()
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*in fail_on_rank_1.*ValueError: the reason in words"):
        run_ranks(fail_on_rank_1, world_size=2, time_limit_s=TIME_LIMIT_S)
    assert time.monotonic() - started_s < TIME_LIMIT_S / 2


def vanish_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_vanishes_is_named_with_its_exit_code():
    with pytest.raises(RankFailedError, match="rank 0 failed:\nended without a result, exit code 3"):
        run_ranks(vanish_on_rank_0, world_size=2, time_limit_s=TIME_LIMIT_S)


def fail_first_of_one_that_vanishes(rank: int, world_size: int) -> None:
    if rank == 0:
        # Longer than rank 1 takes to say what it lost.
        time.sleep(0.2)
        os._exit(3)
    raise ConnectionError("rank 0 is gone")


def test_a_rank_that_vanishes_is_named_before_one_that_tells_of_it_sooner():
    with pytest.raises(RankFailedError, match=r"(?s)rank 0 failed:\nended.*exit code 3\nrank 1 failed.*rank 0 is gone"):
        run_ranks(fail_first_of_one_that_vanishes, world_size=2, time_limit_s=TIME_LIMIT_S)


def sleep_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(TIME_LIMIT_S)
    return rank


@pytest.mark.slow
def test_the_time_limit_ends_a_run_and_names_who_was_awaited():
    started_s = time.monotonic()
    with pytest.raises(RanksTimedOutError, match=r"no result from ranks \[.*1\]"):
        run_ranks(sleep_on_rank_1, world_size=2, time_limit_s=4)
    assert time.monotonic() - started_s < TIME_LIMIT_S / 2


# ---- what the short suite is made of, and what its tests cost ----

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
