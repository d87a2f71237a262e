"""What the ranks do to compare engines, which are visited in turn, round after round.

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


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """One rank's seconds from having a model to the end of its first step; what is imported for it has been."""

    wall_s: float
    cpu_s: float


class Station:
    """One engine on one rank, and how far it has come through the batches."""

    def __init__(self, engine: Engine, workload: Workload, rank: int, accumulation: int = 1) -> None:
        self.engine = engine
        self.workload = workload
        self.rank = rank
        self.accumulation = accumulation
        self.losses: list[float] = []
        self.visits: list[Visit] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            first = len(self.losses) * self.accumulation
            numbers = range(first, first + self.accumulation)
            micro_batches = [self.workload.make_batch(self.rank, step=number) for number in numbers]
            self.losses.append(self.engine.step(*micro_batches))
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

    def figures(self) -> dict[str, Any]:
        """Everything that was noted so far, for the process that compares."""
        return {"losses": self.losses, "visits": [asdict(visit) for visit in self.visits]}

    def close(self) -> None:
        self.engine.close()


class StationAlone(Station):
    """A station in a process of its own, which times its first step."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        engine_name: str,
        workload: Workload,
        accumulation: int,
        warmup_steps: int,
        fused: bool,
        sizes: dict[str, int],
    ) -> None:
        peer = ENGINES[engine_name]
        peer.import_modules()
        model = workload.make_model()
        dist.barrier()
        wall_before_s, cpu_before_s = time.perf_counter(), time.process_time()
        engine = peer(lambda: model, adamw_arguments(fused), **sizes)
        super().__init__(engine, workload, rank, accumulation)
        self.train(1)
        self.first = FirstStep(wall_s=time.perf_counter() - wall_before_s, cpu_s=time.process_time() - cpu_before_s)
        self.train(warmup_steps - 1)

    def figures(self) -> dict[str, Any]:
        return super().figures() | {"first_steps": [asdict(self.first)]}


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
    """This rank's visits and losses by engine, with all engines alive in this process."""
    workload = WORKLOADS[workload_name]
    stations = {}
    for name in engine_names:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused))
        stations[name] = Station(engine, workload, rank)
        stations[name].train(warmup_steps)
    return visit_in_turn(stations, rounds, steps)


def visit_in_turn(stations: dict[str, Station], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Visits all stations of this process in each round, closes them, and returns visits and losses by engine."""
    for name in turns(list(stations), rounds):
        stations[name].visit(steps)
    for station in stations.values():
        station.close()
    return {name: station.figures() for name, station in stations.items()}


def turns(names: list[str], rounds: int) -> list[str]:
    """Who is visited when: each round begins with another, so that none always follows the same neighbour's leavings."""
    turned = []
    for number in range(rounds):
        first = number % len(names)
        turned += names[first:] + names[:first]
    return turned
