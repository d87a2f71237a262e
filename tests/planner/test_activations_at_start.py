"""The forecast of activations and of the peak that rank 0 prints at the start."""

import contextlib
import io
import logging
import os
import random

import pytest
import torch
import torch.distributed as dist
from accelerate_job import Texts
from shared_ranks import run_on_ranks
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from training import LENGTH, gpt2

from hf_zero import ZeroPlugin, make_plan

pytestmark = pytest.mark.timeout(150)


class Stream(IterableDataset):
    """Rows that have no numbers."""

    def __iter__(self):
        return iter(Texts(8))


def drawing(rows):
    """Collates, and draws from every source of random numbers, as collators that mask tokens do."""
    torch.rand(3)
    random.random()
    return default_collate(rows)


class Talking(torch.nn.Module):
    """A model whose forward gathers from the other ranks, as contrastive losses do."""

    def __init__(self):
        super().__init__()
        self.inner = gpt2()

    def forward(self, **batch):
        dist.all_reduce(torch.ones(1))
        return self.inner(**batch)


def failing(rows):
    raise KeyError("a column")


def starts(rank: int, world_size: int) -> dict[str, str]:
    """What is said at the start of runs with these data loaders."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    loaders = {
        "rows": DataLoader(Texts(16), batch_size=2, collate_fn=drawing),
        "none": None,
        "tuples": DataLoader(TensorDataset(*torch.zeros(2, 8, LENGTH, dtype=torch.long)), batch_size=2),
        "masked": DataLoader(TensorDataset(*torch.zeros(3, 8, LENGTH, dtype=torch.long)), batch_size=2),
        "words": DataLoader(Texts(16), batch_size=2, collate_fn=lambda rows: (default_collate(rows), "words")),
        "stream": DataLoader(Stream(), batch_size=2),
        "failing": DataLoader(Texts(16), batch_size=2, collate_fn=failing),
        "talking": DataLoader(Texts(16), batch_size=2),
        "quiet": DataLoader(Texts(16), batch_size=2),
        "usual": DataLoader(Texts(16), batch_size=2),
        "resumed": DataLoader(Texts(16), batch_size=2),
    }
    said = {}
    for name, loader in loaders.items():
        AcceleratorState._reset_state()
        PartialState._reset_state()
        level = {"quiet": logging.ERROR, "usual": logging.NOTSET}.get(name, logging.INFO)
        logging.getLogger("hf_zero").setLevel(level)
        accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(2))
        accelerator.zero_goes_on = name == "resumed"
        model = Talking() if name == "talking" else gpt2()
        forwards = []
        model.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))
        optimizer = torch.optim.AdamW(model.parameters())
        drawn = torch.get_rng_state(), random.getstate()
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            accelerator.prepare(model, optimizer, *([] if loader is None else [loader]))
        assert torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
        assert not forwards
        said[name] = " ".join(stderr.getvalue().replace("│", " ").split())
        accelerator.free_memory()
    return said


def test_the_peak_is_forecast_where_the_data_tells_a_micro_batch():
    here, other = run_on_ranks(starts)
    assert not any(other.values())
    assert f"activations (first rows, 2 x {LENGTH})" in here["rows"] and "peak of a step, within 15%" in here["rows"]
    rows = {name: value[:2] for name, value in default_collate([Texts(2)[0], Texts(2)[1]]).items()}
    plan = make_plan(gpt2(), batch=rows, gpus=2, on_cpu=True, gpu_memory="1GB", kept={"stage": 2})
    [candidate] = plan.candidates
    peak = candidate.forecast.device_bytes / 2**20
    assert f"{peak:.1f} MiB" in here["rows"].partition("peak of a step")[2]
    assert "unknown: no data loader was prepared" in here["none"]
    assert "unknown: batches are neither the keyword arguments of a forward nor tensors" in here["words"]
    for name in ("tuples", "masked"):
        assert f"activations (first rows, 2 x {LENGTH})" in here[name] and "unknown: " not in here[name]
    assert f"{peak:.1f} MiB" in here["tuples"].partition("peak of a step")[2]
    assert "unknown: the data set's rows cannot be read by index" in here["stream"]
    assert "cannot be collated (KeyError" in here["failing"]
    assert "unknown: the model's forward communicates with other ranks" in here["talking"]
    # By default nothing is traced on the host.
    assert "unknown: a trace on CPUs needs log level INFO" in here["usual"]
    for name in ("quiet", "resumed"):
        assert "hf_zero plan: bytes" in here[name] and "activations" not in here[name]
