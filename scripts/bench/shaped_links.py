"""The cost model beside runs of hosts.sh: two hosts of one rank over shaped links. See simulated.py for earlier runs.

    for rate in 100mbit 200mbit 300mbit; do
        JSON=/tmp/$rate.json bash scripts/bench/hosts.sh $rate hf_zero1 hf_zero2 hf_zero3
    done
    python scripts/bench/shaped_links.py /tmp/*mbit.json --json scripts/bench/results/shaped_links.json
    python scripts/bench/shaped_links.py                       # the kept runs once more

What a rank does beside waiting for the link is taken from each run: the step less the waits that the engine has counted. It is
all dealt to forward and backward, where it may overlap with traffic, so a prediction is too low by what does not: the optimizer's
step, and on a busy machine the time in which the threads that send wait for a core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from step import describe_run
from two_hosts import simulated_ms

from hf_zero.config import ZeroConfig

KEPT = Path(__file__).parent / "results" / "shaped_links.json"
STAGES = {f"hf_zero{stage}": stage for stage in range(1, 4)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps of one engine over one link.

    Attributes:
        wait_ms: of a step that the rank has waited for the other one.
        date: when it was measured.
    """

    model: str
    mbit: int
    stage: int
    step_ms: float
    wait_ms: float
    date: str

    @property
    def simulated_ms(self) -> float:
        return simulated_ms(
            self.model,
            ZeroConfig(stage=self.stage),
            compute_s=(self.step_ms - self.wait_ms) / 1000,
            link_bytes_a_second=self.mbit * 1e6 / 8,
            # The optimizer's step is in what was not waited.
            memory_bytes_a_second=1e15,
        )

    @property
    def error(self) -> float:
        return self.simulated_ms / self.step_ms - 1


def runs_in(described: dict[str, Any]) -> Iterable[Run]:
    """The runs of this engine in what hosts.sh has written."""
    options = described["options"]
    for engine in described["engines"]:
        if engine["name"] in STAGES:
            yield Run(
                model=options["model"],
                mbit=int(options["rate"].removesuffix("mbit")),
                stage=STAGES[engine["name"]],
                step_ms=engine["wall_ms"],
                wait_ms=engine["waited_ms"],
                date=described["date"],
            )


def table_of(runs: Iterable[Run]) -> Table:
    table = Table(title="ms a step of two hosts", title_justify="left")
    for heading in ("model", "link", "stage", "waits", "measured", "simulated", "error"):
        table.add_column(heading)
    for run in runs:
        figures = (f"{run.wait_ms:.0f}", f"{run.step_ms:.0f}", f"{run.simulated_ms:.0f}", f"{run.error:+.0%}")
        table.add_row(run.model, f"{run.mbit} Mbit/s", str(run.stage), *figures)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="*", type=Path, help="what hosts.sh has written; by default the kept runs")
    parser.add_argument("--json", type=Path, help="where runs and predictions go")
    options = parser.parse_args()
    if options.measured:
        runs = [run for path in options.measured for run in runs_in(json.loads(path.read_text()))]
    else:
        known = Run.__dataclass_fields__
        kept = json.loads(KEPT.read_text())["runs"]
        runs = [Run(**{name: value for name, value in each.items() if name in known}) for each in kept]
    Console(width=110).print(table_of(runs))
    if options.json is not None:
        described = describe_run(options)
        described["options"] = {}
        figures = [asdict(run) | {"simulated_ms": run.simulated_ms, "error": run.error} for run in runs]
        options.json.write_text(json.dumps(described | {"runs": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
