"""An engine that nobody holds any more goes, with its model, its memory and its threads."""

import gc
import threading
import time
import weakref

import pytest
import torch
from ranks import run_ranks

from hf_zero.engine.engine import ZeroEngine


def train_and_drop(stage: int) -> list[weakref.ref]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], {"stage": stage})
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return [weakref.ref(engine), weakref.ref(model), weakref.ref(optimizer)]


def what_is_left(rank: int, world_size: int) -> dict[int, tuple[int, int]]:
    """Of each stage, objects that are still there, and threads of ours."""
    left = {}
    for stage in range(4):
        references = train_and_drop(stage)
        gc.collect()
        until_s = time.monotonic() + 10
        while _threads() and time.monotonic() < until_s:
            time.sleep(0.05)
        left[stage] = sum(reference() is not None for reference in references), _threads()
    return left


def _threads() -> int:
    return sum(thread.name.startswith("hf_zero") for thread in threading.enumerate())


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_that_was_not_closed_is_freed_with_its_model(world_size):
    for left in run_ranks(what_is_left, world_size=world_size, time_limit_s=60):
        assert left == {stage: (0, 0) for stage in range(4)}
