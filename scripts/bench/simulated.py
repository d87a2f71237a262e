"""The cost model beside steps over shaped links: two hosts of one rank, as hosts.sh makes them.

    python scripts/bench/simulated.py

The measured figures are those of docs/benchmarks.md, by hosts.sh. What a step computes is fitted to one of them, stage 2 at 1
Gbit/s; the links have the rate that they were given. The other steps are predicted.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from two_hosts import simulated_ms

from hf_zero.config import ZeroConfig

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


def main() -> int:
    table = Table(title="ms a step of two hosts", title_justify="left")
    for heading in ("link", "settings", "", "measured", "simulated", "error"):
        table.add_column(heading)
    for (link, settings), measured in MEASURED_MS.items():
        found = simulated_ms(
            "30m",
            ZeroConfig.of(settings),
            compute_s=COMPUTE_S,
            link_bytes_a_second=BYTES_A_SECOND[link],
            memory_bytes_a_second=6e9,
        )
        kind = "fitted" if (link, settings) == FITTED else "predicted"
        table.add_row(link, settings, kind, str(measured), f"{found:.0f}", f"{found / measured - 1:+.0%}")
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
