"""The cost model beside steps over shaped links: two hosts of one rank, as hosts.sh makes them.

    python scripts/bench/simulated.py

The measured figures are those of docs/benchmarks.md, by hosts.sh. What a step computes is fitted to one of them, stage 2 at 1
Gbit/s; the links have the rate that they were given. The other steps are predicted.
"""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.table import Table
from workload import WORKLOADS

from hf_zero.config import ZeroConfig
from hf_zero.integrations.planning.forecasts import Job
from hf_zero.integrations.planning.times import step_time
from hf_zero.plan.forecast import Activations
from hf_zero.plan.machine import Machine

MEASURED_MS = {
    ("1 Gbit/s", "stage=2"): 1429,
    ("1 Gbit/s", "stage=3"): 1606,
    ("1 Gbit/s", "stage=3,reshard_after_forward=false"): 1418,
    ("1 Gbit/s", "stage=3,prefetch_units=0"): 2264,
    ("200 Mbit/s", "stage=2"): 5436,
    ("200 Mbit/s", "stage=3"): 7015,
}
FITTED = ("1 Gbit/s", "stage=2")
BYTES_A_SECOND = {"1 Gbit/s": 1e9 / 8, "200 Mbit/s": 2e8 / 8}
COMPUTE_S = 1.12
"""Forward and backward on one core; fitted."""


def simulated_ms(link: str, settings: str) -> float:
    with torch.device("meta"):
        model = WORKLOADS["30m"].make_model()
    job = Job(
        model=model,
        optimizers=[torch.optim.AdamW(model.parameters(), fused=True)],
        device=torch.device("cpu"),
        world_size=2,
        ranks_a_node=1,
        activations=None,
    )
    work = Activations(curve=((0, 0),), saved_bytes=0, flops=3, forward_flops=1, tokens=1, shape="")
    machine = Machine(
        nodes=2,
        ranks_a_node=1,
        flops=3 / COMPUTE_S,
        link_bytes_a_second=BYTES_A_SECOND[link],
        memory_bytes_a_second=6e9,
        call_s=2e-4,
    )
    return 1000 * step_time(job.layout(ZeroConfig.of(settings)), machine, work, 1).step_s


def main() -> int:
    table = Table(title="ms a step of two hosts", title_justify="left")
    for heading in ("link", "settings", "", "measured", "simulated", "error"):
        table.add_column(heading)
    for (link, settings), measured in MEASURED_MS.items():
        found = simulated_ms(link, settings)
        kind = "fitted" if (link, settings) == FITTED else "predicted"
        table.add_row(link, settings, kind, str(measured), f"{found:.0f}", f"{found / measured - 1:+.0%}")
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
