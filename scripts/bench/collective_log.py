"""The cost of the log of collectives and of the watch for late ranks, on the job of host_time.py.

    python scripts/bench/collective_log.py            # a minute
    python scripts/bench/collective_log.py --quick

The cost is far below the difference between two runs of a step. So the ledger's calls for one collective are timed with and
without the log, in turns, many times, and multiplied by the number of collectives in a step. The watching thread looks twice a
second; one look is timed in a rank. Both are compared with the CPU time of a step. Exits with status 1 above 0.5 %.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import torch
from engines import ENGINES, MAX_NORM, Classifier, adamw_arguments
from harness import Clocks, on_ranks, print_table, read_options

from hf_zero import engine_of
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.waits import Label, Tally
from hf_zero.presence.diagnosis import ScriptCall
from hf_zero.presence.rank_state import script_frame

MOST_SHARE = 0.005
LOOKS_A_SECOND = 2
SITES_A_STEP = 8
"""Number of times per step that the part of training is noted."""
_LABEL = Label(kind="all-gather of parameters", subject="bucket 0")
_TURNS = 9


class LedgerWithoutLog(Ledger):
    """The ledger without its writes to the log."""

    def note(self, label: Label, tally: Tally) -> None:
        tally.number += 1
        self._rows[label.kind].timed_bytes += tally.sent

    def ended(self, kind: str, entry: None, end: None = None, *, has_begun: bool) -> None:
        super().ended(kind, None, end, has_begun=has_begun)


class Cost(NamedTuple):
    """Costs of one engine's step on rank 0, in seconds of CPU time."""

    name: str
    collectives: float
    log_s: float
    look_s: float
    step_s: float

    @property
    def share(self) -> float:
        """Returns the share of the step's CPU time for the log and, as if training used a whole core, for the looks."""
        return self.log_s / self.step_s + LOOKS_A_SECOND * self.look_s


def seconds_of_one_entry(calls: int) -> float:
    """Returns the cost of the log per collective: the fastest turn with the log minus the fastest without."""
    least: dict[type, float] = {}
    for _ in range(_TURNS):
        for kind in (Ledger, LedgerWithoutLog):
            ledger = kind()
            began_s = time.process_time()
            for _ in range(calls):
                entry = ledger.count(_LABEL, 1000, 0)
                ledger.ended(_LABEL.kind, entry, has_begun=ledger.began(_LABEL))
            least[kind] = min(least.get(kind, float("inf")), (time.process_time() - began_s) / calls)
    return least[Ledger] - least[LedgerWithoutLog]


def seconds_of_one_site(calls: int) -> float:
    log, began_s = Ledger().watch.log, time.process_time()
    for _ in range(calls):
        log.site = "forward"
    return (time.process_time() - began_s) / calls


def measure(rank: int, world_size: int, *, names: list[str], n_layer: int, steps: int, calls: int) -> list[Cost]:
    workload, found = Classifier(n_layer=n_layer), []
    entry_s, site_s = seconds_of_one_entry(calls), seconds_of_one_site(calls)
    for name in names:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused=True))
        engine.max_norm = MAX_NORM
        batches = [workload.make_batch(rank, step) for step in range(5 + steps)]
        for batch in batches[:5]:
            engine.step(batch)
        before, clocks = collectives_of(engine), Clocks()
        for batch in batches[5:]:
            engine.step(batch)
        step_s = clocks.spent().cpu_s / steps
        collectives = (collectives_of(engine) - before) / steps
        log_s = collectives * entry_s + SITES_A_STEP * site_s
        found.append(Cost(name, collectives, log_s, seconds_of_one_look(), step_s))
        engine.close()
    return found


def collectives_of(engine: Any) -> int:
    model = getattr(engine.model, "module", engine.model)
    return sum(row.calls for row in engine_of(model).transport.ledger.rows())


def seconds_of_one_look() -> float:
    """Returns the cost of one look for late ranks, at a main thread that waits. For a computing thread, a look costs less."""
    call, times = ScriptCall(), 200
    began_s = time.thread_time()
    for _ in range(times):
        call.look()
        script_frame()
    return (time.thread_time() - began_s) / times


def main() -> int:
    options = read_options(
        __doc__,
        quick={"n_layer": 2, "steps": 5, "calls": 5_000},
        engines=["hf_zero1", "hf_zero2", "hf_zero3"],
        n_layer=12,
        steps=20,
        calls=(50_000, "that are timed in a turn"),
    )
    job = {name: getattr(options, name) for name in ("n_layer", "steps", "calls")} | {"names": options.engines}
    costs: list[Cost] = on_ranks(measure, 2, limit_s=300, **job)[0]
    columns = [
        *(("engine", "name"), ("collectives", "collectives", ".0f"), ("log, us", "log_s", ".1f", 1e-6)),
        *(("step, CPU ms", "step_s", ".1f", 1e-3), ("a look, us", "look_s", ".1f", 1e-6)),
        ("share of CPU time", lambda cost: cost.share, ".3%"),
    ]
    title = f"BERT of {options.n_layer} layers, 2 ranks, a step on rank 0, torch {torch.__version__}"
    print_table(title, columns, costs)
    return int(any(cost.share > MOST_SHARE for cost in costs))


if __name__ == "__main__":
    sys.exit(main())
