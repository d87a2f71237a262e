"""`nonfinite: skip` on a stand-in for an accelerator: norms are read in time."""

import pytest
import standin_device
import torch
from cells import slow
from shared_ranks import on_ranks
from standin_runs import HOST, own_device, prepared
from training import gpt2_batch

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]

SETTINGS = [{"stage": 1}, {"stage": 2, "offload": HOST}, {"stage": 3}]


def trained(settings: dict, rank: int, numbers: list[int], bad: int | None = None) -> list[torch.Tensor]:
    """Parameters behind some steps, in host memory."""
    model, optimizer, engine = prepared({"bucket_bytes": "20KiB", **settings})
    for number in numbers:
        batch = gpt2_batch(torch.Generator().manual_seed(100 * number + rank), 2)
        loss = model(**{name: values.to(own_device()) for name, values in batch.items()}).loss
        (loss * float("nan") if number == bad and rank == 0 else loss).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.bad_steps.skipped == int(bad is not None)
    with engine.gathered():
        return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cells"), [(2, SETTINGS), slow(1, SETTINGS)])
@on_ranks(time_limit_s=300)
def test_what_is_left_out_leaves_no_trace(rank, world_size, cells, library, tmp_path):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    with standin_device.process_group(rank, world_size, folder):
        for settings in cells:
            found = trained({**settings, "nonfinite": "skip"}, rank, [0, 1, 2, 3], bad=2)
            assert all(map(torch.equal, found, trained(settings, rank, [0, 1, 3]))), settings
    assert compiled.hazards() == compiled.crossings() == []
