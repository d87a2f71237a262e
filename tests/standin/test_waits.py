"""How often a step stops the host for the device, and how many events it records that note the time.

python -m pytest tests/standin/test_waits.py -s    # shows the figures
"""

from collections import Counter
from pathlib import Path

import pytest
import standin_device
import torch
import torch.distributed as dist
from ranks import run_ranks
from standin_runs import own_device
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine

pytestmark = [pytest.mark.timeout(150), standin_device.needs_compiler]

FIRST, STEPS = 4, 6
"""In the first steps the engine looks at more."""


def counted(rank: int, world_size: int, library: Path, folder: str) -> dict[int, list[tuple[Counter, int]]]:
    """By stage, for each step of GPT-2 with 3 layers: what the host waits for, and the events that note the time."""
    compiled = standin_device.register(library)
    found: dict[int, list[tuple[Counter, int]]] = {}
    with standin_device.process_group(rank, world_size, folder):
        for stage in range(4):
            torch.manual_seed(0)
            model = gpt2().to(own_device())
            optimizer = fused_adamw(model)
            engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "20KiB"})
            batch = gpt2_batch(torch.Generator().manual_seed(dist.get_rank()), 2)
            batch = {name: values.to(own_device()) for name, values in batch.items()}
            found[stage] = []
            for _ in range(STEPS):
                waits, events = len(compiled.waits()), compiled.timed_events()
                model(**batch).loss.backward()
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                kinds = Counter(what for _, what in compiled.waits()[waits:])
                found[stage].append((kinds, compiled.timed_events() - events))
            engine.close()
    return found


MOST = {
    0: ((1, 1), (20, 20)),
    1: ((1, 1), (40, 40)),
    2: ((1, 1), (40, 40)),
    3: ((129, 1), (82, 74)),
}
"""By stage: waits of a step and events that note the time, each in one of the first steps and later."""


def test_steps_wait_no_more_often_and_note_no_more_times(library, tmp_path):
    arguments = {"library": library, "folder": str(tmp_path)}
    [found, _] = run_ranks(counted, world_size=2, time_limit_s=120, keyword_arguments=arguments)
    for stage, steps in found.items():
        waits, events = [sum(kinds.values()) for kinds, _ in steps], [noted for _, noted in steps]
        kinds = sum((kinds for kinds, _ in steps), Counter())
        print(f"stage {stage}: waits a step {waits}, events that note the time {events}; all waits: {dict(kinds)}")
        for figures, (at_first, later) in zip((waits, events), MOST[stage], strict=True):
            assert max(figures[:FIRST]) <= at_first and max(figures[FIRST:]) <= later, (stage, figures)
