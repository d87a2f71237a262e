"""Work of several ranks that succeeds on all or raises on all: ranks are threads here, and one exchange is all they have."""

import threading
from collections.abc import Callable

import pytest

from hf_zero.comm.all_or_none import all_or_none, all_results_or_none, raise_on_all

pytestmark = pytest.mark.timeout(30)

RANKS = 3


class Meeting:
    """An exchange between threads, which counts how often they met."""

    def __init__(self) -> None:
        self._values: list = [None] * RANKS
        self._passed = 0
        self._barrier = threading.Barrier(RANKS, self._pass, timeout=10)

    @property
    def times(self) -> int:
        return self._passed // 2

    def exchange_of(self, rank: int) -> Callable[[object], list]:
        def exchange(value: object) -> list:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return exchange

    def _pass(self) -> None:
        self._passed += 1


def on_ranks(target: Callable) -> tuple[list, Meeting]:
    """What `target(rank, exchange)` returns or raises on each rank."""
    meeting, found = Meeting(), [None] * RANKS

    def run(rank: int) -> None:
        try:
            found[rank] = target(rank, meeting.exchange_of(rank))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found, meeting


def work_that_fails(faults: dict[int, BaseException]) -> Callable:
    def target(rank: int, exchange: Callable) -> str:
        def work() -> str:
            if rank in faults:
                raise faults[rank]
            return f"result of rank {rank}"

        return all_or_none(
            exchange, work, expected=(OSError,), error=lambda rank, reason: ValueError(f"rank {rank}: {reason}")
        )

    return target


def test_each_rank_gets_its_own_result_where_all_succeed():
    found, meeting = on_ranks(work_that_fails({}))
    assert found == [f"result of rank {rank}" for rank in range(RANKS)]
    assert meeting.times == 1


def test_every_rank_raises_the_error_of_the_lowest_rank_that_failed():
    faults = {1: OSError("disk"), 2: PermissionError("folder")}
    found, meeting = on_ranks(work_that_fails(faults))
    assert [type(error) for error in found] == [ValueError] * RANKS
    assert {str(error) for error in found} == {"rank 1: disk"}
    assert [error.__cause__ for error in found] == [None, faults[1], faults[2]]
    assert meeting.times == 1


def test_an_exception_that_is_not_expected_stays_itself_and_holds_up_nobody():
    faults = {1: KeyError("x"), 2: OSError("disk")}
    found, _ = on_ranks(work_that_fails(faults))
    assert found[1] is faults[1]
    assert [type(found[rank]) for rank in (0, 2)] == [RuntimeError] * 2
    assert str(found[0]) == str(found[2]) == "hf_zero: rank 1 failed: KeyError: 'x'"


def test_what_is_no_exception_of_the_work_is_raised_before_the_exchange():
    def interrupted() -> None:
        raise KeyboardInterrupt

    def exchange(value: object) -> list:
        raise AssertionError("the process is ending")

    with pytest.raises(KeyboardInterrupt):
        all_or_none(exchange, interrupted, expected=(Exception,), error=lambda *_: ValueError())


def test_every_rank_gets_all_results_with_the_same_exchange():
    def target(rank: int, exchange: Callable) -> list:
        return all_results_or_none(exchange, lambda: 10 * rank, expected=(OSError,), error=lambda *_: ValueError())

    found, meeting = on_ranks(target)
    assert found == [[0, 10, 20]] * RANKS
    assert meeting.times == 1


def test_all_results_are_none_where_one_rank_fails():
    def target(rank: int, exchange: Callable) -> list:
        def work() -> float:
            return 1 / (rank - 2)

        return all_results_or_none(
            exchange, work, expected=(ZeroDivisionError,), error=lambda rank, _: ValueError(f"rank {rank}")
        )

    found, _ = on_ranks(target)
    assert [(type(error), str(error)) for error in found] == [(ValueError, "rank 2")] * RANKS


def test_what_is_told_of_an_exception_can_carry_more_than_its_text():
    def target(rank: int, exchange: Callable) -> None:
        fault = OSError(28, "no space") if rank == 1 else None
        raise_on_all(
            exchange,
            fault,
            expected=(OSError,),
            tell=lambda error: (error.errno, error.strerror),
            error=lambda rank, told: OSError(told[0], f"on rank {rank}: {told[1]}"),
        )

    found, _ = on_ranks(target)
    assert {(error.errno, error.strerror) for error in found} == {(28, "on rank 1: no space")}
