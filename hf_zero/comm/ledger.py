"""What communication cost: calls, bytes this rank sent, and seconds the step waited, by kind of collective."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CommRow:
    """One kind of collective since the ledger was opened. `wait_seconds` is time the host stood still for it."""

    kind: str
    calls: int
    bytes_sent: int
    wait_seconds: float


class Ledger:
    """Counts what the transport is asked to do; one a transport."""

    def __init__(self):
        self._calls: dict[str, int] = defaultdict(int)
        self._bytes: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._is_waiting = False

    def count(self, kind: str, bytes_sent: int) -> None:
        self._calls[kind] += 1
        self._bytes[kind] += bytes_sent

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        if self._is_waiting:
            # A collective that is made of others: its time is theirs.
            yield
            return
        start = time.perf_counter()
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False
            self._seconds[kind] += time.perf_counter() - start

    def rows(self) -> tuple[CommRow, ...]:
        return tuple(
            CommRow(kind=k, calls=self._calls[k], bytes_sent=self._bytes[k], wait_seconds=self._seconds[k])
            for k in sorted(self._calls)
        )
