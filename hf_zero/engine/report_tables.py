"""A rank's memory and traffic, as rows and as a table."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from ..comm.ledger import CommRow
from ..device import in_units
from ..optimizer.bucket_state import KernelReport

IN_FILES = "NVMe"
"""Location of a row whose bytes are in files, not in memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes of one kind on this rank, their memory, and the bytes of the same kind under DDP."""

    kind: str
    bytes: int
    ddp_bytes: int
    where: str = "device"


@dataclass(frozen=True, kw_only=True)
class TrafficReport:
    """Bytes of a rank's state and parameters in files in `folder`.

    Attributes:
        held_bytes: bytes in the files.
        window_bytes: maximum bytes in memory during the step.
        read_bytes_a_step: bytes read by the last step, including reads since the step before.
        written_bytes_a_step: the same for writes, which wear out a solid-state disk. Its maker specifies the endurance in bytes.
    """

    folder: Path
    held_bytes: int
    window_bytes: int
    read_bytes_a_step: int
    written_bytes_a_step: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """State on this rank by kind.

    Attributes:
        peak_bytes: the process's peak memory, including activations.
        traffic: None if all state is in memory.
        kernels: None if the optimizers step all buckets themselves.
    """

    rows: tuple[MemoryRow, ...]
    peak_bytes: int
    traffic: TrafficReport | None = None
    kernels: KernelReport | None = None

    @property
    def total_bytes(self) -> int:
        """Counts bytes in memory, without files."""
        return sum(row.bytes for row in self.rows if row.where != IN_FILES)

    @property
    def ddp_total_bytes(self) -> int:
        return sum(row.ddp_bytes for row in self.rows)

    def table(self) -> str:
        rows = [(row.kind, in_units(row.bytes), row.where, in_units(row.ddp_bytes)) for row in self.rows]
        rows.append(("total", in_units(self.total_bytes), "", in_units(self.ddp_total_bytes)))
        rows.append(("peak of the process", in_units(self.peak_bytes), "", ""))
        if self.traffic is not None:
            rows.append(("files", in_units(self.traffic.held_bytes), IN_FILES, ""))
            rows.append(("read by the last step", in_units(self.traffic.read_bytes_a_step), IN_FILES, ""))
            rows.append(("written by the last step", in_units(self.traffic.written_bytes_a_step), IN_FILES, ""))
        return render("Memory a rank", ("kind", "held", "where", "DDP would hold"), rows)


@dataclass(frozen=True, kw_only=True)
class CommReport:
    """Bytes sent by this rank, by link, and its waits, since the engine was built.

    Attributes:
        timed_from: first optimizer step in which waits were measured; None if they were measured from the start. On an
            accelerator, the measurement begins with the first report.
        gradient_error: relative error of a quantized reduced gradient. It is sampled on one bucket, a different one every hundred
            backward passes. None if gradients are not quantized.
        not_counted: describes traffic that is not in the rows; "" if there is none.
    """

    rows: tuple[CommRow, ...]
    timed_from: int | None = None
    gradient_error: float | None = None
    not_counted: str = ""

    @property
    def bytes_sent(self) -> int:
        return sum(row.bytes_sent for row in self.rows)

    def bytes_by_verb(self) -> dict[str, int]:
        """Bytes sent by collective: the first word of the kind ("reduce-scatter of gradients")."""
        sums: dict[str, int] = {}
        for row in self.rows:
            verb = row.kind.split(" ")[0]
            sums[verb] = sums.get(verb, 0) + row.bytes_sent
        return sums

    @property
    def bytes_between(self) -> int:
        """Bytes sent to ranks on other nodes."""
        return sum(row.bytes_between for row in self.rows)

    @property
    def wait_seconds(self) -> float:
        """Exposed communication: the time during which the host or, on an accelerator, the device was blocked."""
        return sum(row.wait_seconds for row in self.rows)

    def table(self) -> str:
        rows = [
            (
                row.kind,
                str(row.calls),
                in_units(row.bytes_sent - row.bytes_between),
                in_units(row.bytes_between),
                f"{1e3 * row.wait_seconds:,.0f}",
                f"{row.gb_per_second:.3f}",
            )
            for row in self.rows
        ]
        inside, between = in_units(self.bytes_sent - self.bytes_between), in_units(self.bytes_between)
        rows.append(("total", "", inside, between, f"{1e3 * self.wait_seconds:,.0f}", ""))
        columns = ("kind", "calls", "in node", "between nodes", "exposed ms", "GB/s")
        more = [*filter(None, [self.not_counted])]
        if self.timed_from is not None:
            more = [
                f"Exposed ms and GB/s cover the steps after step {self.timed_from}, when timing was first requested.",
                *more,
            ]
        return render("Sent by this rank", columns, rows) + "".join(f"{line}\n" for line in more)


def mib(nbytes: int) -> str:
    """Bytes as MiB with one decimal."""
    return f"{nbytes / 2**20:,.1f}"


_WITHOUT_TERMINAL = 100
"""Columns of a table in a log file or notebook: there, lines that are longer than the page do not wrap."""


def render(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a plain-text table not wider than the terminal; long cells are wrapped in their column."""
    # Imported here because most ranks print no table, and rich is a fifth of the time of `import hf_zero`.
    # Its first import draws a random number, which would set the printing rank's numbers apart from the other ranks'.
    drawn = random.getstate()
    from rich.console import Console
    from rich.table import Table

    random.setstate(drawn)
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    buffer = StringIO()
    Console(file=buffer, width=shutil.get_terminal_size((_WITHOUT_TERMINAL, 0)).columns, color_system=None).print(table)
    return buffer.getvalue()
