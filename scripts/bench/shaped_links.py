"""The cost model beside runs of hosts.sh: two hosts of one rank over shaped links.

    for rate in 100mbit 1gbit 10gbit; do
        DELAY=1ms JSON=/tmp/$rate.json bash scripts/bench/hosts.sh $rate hf_zero1 hf_zero2 hf_zero3
    done
    python scripts/bench/shaped_links.py /tmp/*bit.json --json scripts/bench/results/links.json
    python scripts/bench/shaped_links.py                       # the kept runs once more

What a rank does beside waiting for the link is taken from each run: the step less the waits that the engine has counted. It is
all dealt to forward and backward, where it may overlap with traffic, so a forecast is too low by what does not: the optimizer's
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

from record import BENCH_FOLDER, describe_run, write_record
from reports import links
from two_hosts import simulated_ms

from hf_zero.config import ZeroConfig

KEPT = BENCH_FOLDER / "results" / "links.json"
STAGES = {f"hf_zero{stage}": stage for stage in range(1, 4)}
"""What the cost model forecasts."""

_MBIT = {"gbit": 1000, "mbit": 1}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps of one engine over one link.

    Attributes:
        delay_ms: of the link, one way.
        wait_ms: of a step that the rank has waited for the other one; None where the engine does not count it.
        date: when it was measured.
        load: other work on the machine before it began.
    """

    engine: str
    title: str
    model: str
    mbit: int
    delay_ms: float
    step_ms: float
    wait_ms: float | None
    date: str
    load: float | None

    @property
    def simulated_ms(self) -> float | None:
        """The cost model's figure; None where there is none."""
        if self.engine not in STAGES or self.wait_ms is None:
            return None
        return simulated_ms(
            self.model,
            ZeroConfig(stage=STAGES[self.engine]),
            compute_s=(self.step_ms - self.wait_ms) / 1000,
            link_bytes_a_second=self.mbit * 1e6 / 8,
            # The optimizer's step is in what was not waited.
            memory_bytes_a_second=1e15,
            delay_s=self.delay_ms / 1000,
        )

    def figures(self) -> dict[str, Any]:
        simulated = self.simulated_ms
        error = None if simulated is None else simulated / self.step_ms - 1
        return asdict(self) | {"simulated_ms": simulated, "error": error}


def runs_in(described: dict[str, Any]) -> Iterable[Run]:
    """The runs in what hosts.sh has written."""
    options = described["options"]
    for engine in described["engines"]:
        yield Run(
            engine=engine["name"],
            title=engine["title"],
            model=options["model"],
            mbit=_mbit(options["rate"]),
            delay_ms=float(options["delay"].removesuffix("ms")),
            step_ms=engine["wall_ms"],
            wait_ms=engine["waited_ms"],
            date=described["date"],
            load=described["load_before"],
        )


def _mbit(rate: str) -> int:
    [unit] = [unit for unit in _MBIT if rate.endswith(unit)]
    return int(rate.removesuffix(unit)) * _MBIT[unit]


def record_of(runs: Iterable[Run]) -> dict[str, Any]:
    return {"kind": "links", "runs": [run.figures() for run in runs]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="*", type=Path, help="what hosts.sh has written; by default the kept runs")
    parser.add_argument("--json", type=Path, help="where runs and forecasts go")
    options = parser.parse_args()
    if options.measured:
        runs = [run for path in options.measured for run in runs_in(json.loads(path.read_text()))]
    else:
        known = Run.__dataclass_fields__
        kept = json.loads(KEPT.read_text())["runs"]
        runs = [Run(**{name: value for name, value in each.items() if name in known}) for each in kept]
    record = record_of(runs)
    print(links(record)["links"])
    if options.json is not None:
        write_record(options.json, describe_run(options) | record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
