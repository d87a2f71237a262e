"""The fault matrix: a fault on one rank, and the end of all ranks.

    export PYTHONPATH=tests/support:scripts/bench
    python tests/support/fault_matrix.py                    # ten minutes
    python tests/support/fault_matrix.py --stages 3 --ways engine --faults "hang in evaluate"

Prints a table: when each rank ended, in seconds since the fault (including the threshold), and its message.
"""

import argparse
import itertools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from faulty_ranks import outcomes, why_no_namespaces
from rich.console import Console
from rich.table import Table

LATE_S = 4.0
WITHIN_S = 30.0
"""Time after the threshold on an idle machine. Tests allow twice this time, as they run in parallel with others."""
AT_ONCE = 5
"""Number of runs in parallel."""
FAULTS = (
    "hang in evaluate",
    "stopped",
    "killed",
    "extra forward",
    "save on rank 0 alone",
    "different batch counts",
    "different seeds",
    "diverged replica",
    "link cut",
)
HARMLESS = {("extra forward", 2), ("extra forward", 3), ("different seeds", 2), ("different seeds", 3)}
"""Fault and stage after which training has to continue, as under DDP: ranks may run different numbers of forwards, and rank 0's
parameters are sent to all ranks at the start."""
ONLY_BELOW_3 = {"diverged replica"}
"""At stage 3 there is one copy of each parameter."""
FROM_OUTSIDE = {"stopped", "killed", "different seeds"}
UNSAID = {"stopped", "killed"}
"""Faults whose rank cannot print a message."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run and the ends of its ranks: exit codes, seconds since the fault, first messages.

    Attributes:
        within_s: allowed time for a rank's end after the threshold.
    """

    fault: str
    stage: int
    way: str
    codes: list[int | None]
    seconds: list[float]
    messages: list[str]
    within_s: float = WITHIN_S

    @property
    def fault_found(self) -> str | None:
        """Describes the first fault in the ranks' ends; None if all are right."""
        if (self.fault, self.stage) in HARMLESS:
            return None if set(self.codes) == {0} else f"did not go on: {self.codes}"
        for rank, (code, seconds) in enumerate(zip(self.codes, self.seconds)):
            is_at_fault = rank == 1 and self.fault in (*UNSAID, "different batch counts")
            if not is_at_fault and code in (0, None):
                return f"rank {rank} ended with {code}"
            if not is_at_fault and seconds > LATE_S + self.within_s:
                return f"rank {rank} took {seconds:.0f} s"
            if not is_at_fault and "rank" not in self.messages[rank]:
                return f"rank {rank} named no rank: {self.messages[rank]}"
        return None


def run_cells(faults: list[str], stages: list[int], ways: list[str], within_s: float = WITHIN_S) -> list[Cell]:
    """Runs all combinations, a few in parallel."""
    left = [
        {"stage": stage, "fault": fault, "way": way, "limit_s": 1800.0, "late_s": LATE_S, "patience_s": 90.0}
        for fault, stage, way in itertools.product(faults, stages, ways)
        if not (fault in ONLY_BELOW_3 and stage == 3)
        # In network namespaces there is no launcher's store, which the other ways need.
        if not (fault == "link cut" and (why_no_namespaces() or way != "accelerate"))
    ]
    cells = []
    while left:
        now, left = left[:AT_ONCE], left[AT_ONCE:]
        with tempfile.TemporaryDirectory() as folder:
            for run, ranks in zip(now, outcomes(now, Path(folder, "runs")), strict=True):
                cells.append(
                    Cell(
                        fault=run["fault"],
                        stage=run["stage"],
                        way=run["way"],
                        codes=[rank["code"] for rank in ranks],
                        seconds=[rank["seconds"] for rank in ranks],
                        messages=[message_of(rank["said"]) for rank in ranks],
                        within_s=within_s,
                    )
                )
    return cells


def message_of(said: str) -> str:
    """Returns the first lines of the error, without the traceback."""
    lines = [line.removeprefix("[rank0]: ").removeprefix("[rank1]: ") for line in said.splitlines()]
    for index, line in enumerate(lines):
        if "hf_zero: " in line and ("waiting" not in line or "failed while waiting" in line):
            more = next((each.strip() for each in lines[index + 1 : index + 2] if each.startswith("  ")), "")
            return f"{line[line.index('hf_zero: ') + 9 :]} {more}".strip()
    return next((line for line in reversed(lines) if line.strip()), "")


def print_table(cells: list[Cell]) -> None:
    table = Table(title=f"ranks that end, comm.late_s {LATE_S:.0f} s", title_justify="left", show_lines=True)
    for column in ("fault", "stage", "way", "codes", "seconds", "what a rank said"):
        table.add_column(column, overflow="fold")
    for cell in cells:
        seconds = " ".join(f"{each:.1f}" for each in cell.seconds)
        verdict = "" if cell.fault_found is None else f"NOT AS IT SHOULD: {cell.fault_found}. "
        codes = " ".join("held" if code is None else str(code) for code in cell.codes)
        table.add_row(cell.fault, str(cell.stage), cell.way, codes, seconds, f"{verdict}{cell.messages[0][:400]}")
    Console(width=160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--ways", nargs="+", default=["engine", "accelerate", "trainer"])
    options = parser.parse_args()
    cells = run_cells(options.faults, options.stages, options.ways)
    print_table(cells)
    return int(any(cell.fault_found for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
