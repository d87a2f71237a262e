"""What one rank does to compare engines: all of them alive in one process, visited in turn, round after round.

Two runs one after the other differ by more than the engines do. Visits a second apart do not, so every figure is
meant to be compared with the baseline's figure of the same round.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from peers import ENGINES, Engine
from wire import tcp_bytes
from workload import WORKLOADS, Workload, adamw_arguments


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One rank's figures for a few steps of one engine, all of them per step."""

    cpu_ms: float  # of all threads
    thread_ms: float  # of the thread that runs the steps
    wall_ms: float
    sent_bytes: float
    received_bytes: float
    waited_ms: float | None


class Station:
    """One engine on one rank, and how far it has come through the batches."""

    def __init__(self, engine: Engine, workload: Workload, rank: int) -> None:
        self.engine = engine
        self.workload = workload
        self.rank = rank
        self.losses: list[float] = []
        self.visits: list[Visit] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            input_ids = self.workload.make_batch(self.rank, step=len(self.losses))
            self.losses.append(self.engine.step(input_ids))
        self.engine.finish()

    def visit(self, steps: int) -> None:
        """Train for some steps and note what they cost."""
        dist.barrier()
        bytes_before = tcp_bytes()
        waited_before_ms = self.engine.waited_ms()
        wall_before_s, cpu_before_s, thread_before_s = time.perf_counter(), time.process_time(), time.thread_time()
        self.train(steps)
        thread_s = time.thread_time() - thread_before_s
        cpu_s, wall_s = time.process_time() - cpu_before_s, time.perf_counter() - wall_before_s
        waited_ms = None if waited_before_ms is None else (self.engine.waited_ms() - waited_before_ms) / steps
        dist.barrier()
        bytes_after = tcp_bytes()
        # A rank that leaves closes its sockets, and what they have counted is gone on both sides.
        dist.barrier()
        self.visits.append(
            Visit(
                cpu_ms=1e3 * cpu_s / steps,
                thread_ms=1e3 * thread_s / steps,
                wall_ms=1e3 * wall_s / steps,
                sent_bytes=(bytes_after.sent - bytes_before.sent) / steps,
                received_bytes=(bytes_after.received - bytes_before.received) / steps,
                waited_ms=waited_ms,
            )
        )


def measure_rounds(
    rank: int,
    world_size: int,
    *,
    engine_names: list[str],
    workload_name: str,
    fused: bool,
    warmup_steps: int,
    rounds: int,
    steps: int,
) -> dict[str, dict[str, Any]]:
    """This rank's visits and losses, by engine."""
    workload = WORKLOADS[workload_name]
    stations = {}
    for name in engine_names:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused))
        stations[name] = Station(engine, workload, rank)
        stations[name].train(warmup_steps)
    return visit_in_turn(stations, rounds, steps)


def visit_in_turn(stations: dict[str, Station], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Visits all stations in each round, closes them, and returns visits and losses by engine."""
    names = list(stations)
    for round_index in range(rounds):
        # Each round begins with another engine, so that none always follows the same neighbour's leavings.
        first = round_index % len(names)
        for name in names[first:] + names[:first]:
            stations[name].visit(steps)
    for station in stations.values():
        station.engine.close()
    return {
        name: {"losses": station.losses, "visits": [asdict(visit) for visit in station.visits]}
        for name, station in stations.items()
    }
