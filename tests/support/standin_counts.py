"""How often a step stops the host for the device, and how many timing events it records: counted on the stand-in device.

    python tests/support/standin_counts.py        # half a minute; a GPT-2 of 3 layers on two ranks, at each stage and more

Counts are the same on a busy machine. They are of this rank's threads all together; the loop itself reads nothing of the device.
"If asked" is behind a call of `comm_report`, from which on waits are timed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import standin_device
import torch
import torch.distributed as dist
from standin_runs import MAX_NORM, own_device
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine

SETTINGS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 1, bfloat16": {"stage": 1, "param_dtype": "bfloat16"},
    "stage 2, int8 gradients": {"stage": 2, "comm": {"gradients": "int8"}},
}


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Of one step on one rank.

    Attributes:
        waits: what the host has waited for, and how often.
        events: recorded to be timed.
        collectives: started.
        timed_from: that of the engine's report, if it was asked for one before this step; else None.
        loss: of the step.
    """

    waits: Counter[str]
    events: int
    collectives: int
    timed_from: int | None
    loss: float


def count_events(module: ModuleType) -> Counter[str]:
    """Counts from now on the device's events that are recorded to be timed, as `recorded`, and those that are made, as `made`."""
    counted: Counter[str] = Counter()

    class Counted(module.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False):
            counted["made"] += enable_timing
            event = super().__new__(cls, enable_timing=enable_timing, blocking=blocking)
            event.is_timed = enable_timing
            return event

        def record(self, stream: torch.Stream | None = None) -> None:
            counted["recorded"] += self.is_timed
            super().record(stream)

    module.Event = Counted
    return counted


def counted_steps(
    rank: int, world_size: int, library: Path, folder: str, settings: dict[str, dict], n_steps: int, n_asked: int
) -> dict[str, list[StepCounts]]:
    """Under each settings, by name, the counts of each step of a clipped loop.

    Args:
        n_asked: how many steps at the end come behind a call of `comm_report`.
    """
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    events = count_events(torch.get_device_module(standin_device.NAME))
    with standin_device.process_group(rank, world_size, folder):
        found = {name: _counted(compiled, events, each, n_steps, n_asked) for name, each in settings.items()}
    assert compiled.hazards() == compiled.crossings() == []
    return found


def _counted(
    compiled: ModuleType, events: Counter[str], settings: dict, n_steps: int, n_asked: int
) -> list[StepCounts]:
    torch.manual_seed(0)
    model = gpt2(layers=3).to(own_device())
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], {"bucket_bytes": "20KiB", **settings})
    generators = (torch.Generator().manual_seed(100 * seed + dist.get_rank()) for seed in range(n_steps))
    batches = [
        {name: values.to(own_device()) for name, values in gpt2_batch(generator, 2).items()} for generator in generators
    ]
    found, losses = [], []
    timed_from = None
    for step, batch in enumerate(batches):
        if step >= n_steps - n_asked:
            timed_from = engine.comm_report().timed_from
        waited, recorded, started = len(compiled.waits()), events["recorded"], _collectives(engine)
        loss = model(**batch).loss
        loss.backward()
        engine.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        waits = Counter(what for _, what in compiled.waits()[waited:])
        counts = {"events": events["recorded"] - recorded, "collectives": _collectives(engine) - started}
        found.append({"waits": waits, "timed_from": timed_from, **counts})
    engine.finish_parameters()
    return [StepCounts(**counts, loss=loss.item()) for counts, loss in zip(found, losses, strict=True)]


def _collectives(engine: ZeroEngine) -> int:
    """By the watch, which is asked without the ledger noticing."""
    return sum(engine.transport.watch.begun.values())
