"""What communication cost: calls, bytes this rank sent and over which links, and how long, by kind of collective."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(kw_only=True)
class CommRow:
    """One kind of collective since the ledger was opened.

    Attributes:
        bytes_sent: by this rank.
        bytes_between: of those, the ones to ranks on other nodes.
        wait_seconds: exposed communication: how long the host stood still for it.
        under_way_seconds: how long at least one was between its start and the moment when somebody needed its end.
    """

    kind: str
    calls: int = 0
    bytes_sent: int = 0
    bytes_between: int = 0
    wait_seconds: float = 0.0
    under_way_seconds: float = 0.0

    @property
    def gb_per_second(self) -> float:
        """Achieved 1e9 bytes a second: a lower bound where collectives end long before somebody needs them."""
        return self.bytes_sent / self.under_way_seconds / 1e9 if self.under_way_seconds else 0.0


class Ledger:
    """Counts what the transport is asked to do; one a transport."""

    def __init__(self):
        self._rows: dict[str, CommRow] = {}
        self._under_way: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._is_waiting = False

    def count(self, kind: str, bytes_sent: int, bytes_between: int) -> None:
        row = self._row(kind)
        row.calls += 1
        row.bytes_sent += bytes_sent
        row.bytes_between += bytes_between

    def began(self, kind: str) -> None:
        """A collective of this kind has been started."""
        if not self._under_way.get(kind):
            self._since[kind] = time.perf_counter()
        self._under_way[kind] = self._under_way.get(kind, 0) + 1

    def ended(self, kind: str) -> None:
        """One of this kind has been finished."""
        self._under_way[kind] -= 1
        if not self._under_way[kind]:
            self._row(kind).under_way_seconds += time.perf_counter() - self._since[kind]

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
            self._row(kind).wait_seconds += time.perf_counter() - start

    def rows(self) -> tuple[CommRow, ...]:
        """The state of now, by kind."""
        return tuple(replace(row) for _, row in sorted(self._rows.items()) if row.calls)

    def _row(self, kind: str) -> CommRow:
        return self._rows.setdefault(kind, CommRow(kind=kind))
