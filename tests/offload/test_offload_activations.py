"""What a forward saves, in host memory until its backward: the same training, with less held on the device meanwhile."""

from dataclasses import replace

import pytest
import torch
from cells import slow
from offload_cells import JOBS
from offloaded_params import BERT, IN_TWO_PLACES, assert_bitwise, compared
from ranks import run_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(180)

MOVED = {"activations": "cpu"}
DROPPING = replace(JOBS["clip and accumulation"], steps=2, model_arguments={"dropout": 0.1})
MANY = {"dropping": DROPPING, **IN_TWO_PLACES, "bert": replace(BERT, steps=2, autocast=True), "odd": JOBS["odd model"]}
PLACES = [MOVED, MOVED | {"params": "cpu", "optimizer": "cpu"}]

# Stage, jobs, and places for what is saved: each job once, and each stage.
SOME = [
    (0, ["bert"], PLACES[:1]),
    (1, ["bert with dropout"], PLACES[:1]),
    (2, ["odd"], PLACES[:1]),
    (3, ["dropping"], PLACES),
    (3, ["recomputed by hooks", "recomputed in a graph of its own"], PLACES[:1]),
]
EVERY = [(0, MANY, PLACES[:1]), (1, ["dropping"], PLACES[:1]), (2, ["dropping"], PLACES[:1]), (3, MANY, PLACES)]


def in_stages(rank: int, world_size: int, cells: list[tuple]) -> list[tuple]:
    found = []
    for stage, names, places in cells:
        plain = {"stage": stage, "bucket_bytes": "20KiB"}
        jobs = {name: MANY[name] for name in names}
        found += compared(rank, world_size, jobs, [{**plain, "offload": place} for place in places], plain)
    return found


@pytest.mark.parametrize(
    ("world_size", "cells"), [(2, SOME), slow(2, EVERY), slow(1, EVERY)], ids=["2", "2-every", "1-every"]
)
def test_every_stage_is_bitwise_with_dropout_checkpointing_and_autocast(world_size, cells):
    arguments = {"cells": cells}
    for found in run_ranks(in_stages, world_size=world_size, time_limit_s=170, keyword_arguments=arguments):
        assert len(found) == sum(len(names) * len(places) for _, names, places in cells)
        assert_bitwise(found)


class Storages(TorchDispatchMode):
    """Every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive_bytes(self, but: set[int]) -> int:
        return sum(n for key, (ref, n) in self._seen.items() if key not in but and not ref.expired())


def held_after_forward(offload: dict) -> tuple[int, ZeroEngine, torch.Tensor]:
    torch.manual_seed(0)
    model = gpt2().train()
    engine = ZeroEngine(model, [fused_adamw(model)], {"stage": 2, "offload": offload})
    lasting = [*model.parameters(), *model.buffers(), *(bucket.flat for bucket in engine.buckets)]
    with Storages() as storages:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(0), 8)).loss
    copies = {moved._values.untyped_storage()._cdata for moved in engine.activations.moved()} if offload else set()
    held = storages.alive_bytes(copies | {tensor.untyped_storage()._cdata for tensor in lasting})
    return held, engine, loss


def test_bytes_held_on_the_device_between_forward_and_backward_fall():
    plain, _, _ = held_after_forward({})
    held, engine, loss = held_after_forward(MOVED)
    print(f"\nheld {held} bytes of {plain}; in host memory {engine.activations.held_bytes}")
    assert held < 0.25 * plain
    assert engine.activations.held_bytes > 0.6 * plain
    assert {row.kind: row.where for row in engine.memory_report().rows}["activations, at most"] == "host memory"
    loss.backward()
    assert engine.activations.held_bytes == 0


class Shares(nn.Module):
    """Saves three parts of one storage, and a tensor that it writes into after it was saved."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).split(64, -1)
        attended = torch.softmax(q @ k.t(), -1) @ v
        out = attended * 2
        kept = out.exp()
        return (kept + out.relu_()).sum()


def test_a_storage_moves_once_and_a_write_after_the_save_is_seen():
    gradients = []
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    for offload in ({}, MOVED):
        torch.manual_seed(0)
        model = Shares()
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": 0, "offload": offload})
        loss = model(x)
        if offload:
            # The input, the projection once, softmax, exp and relu.
            assert engine.activations.held_bytes == 4 * 64 * (64 + 192 + 64 + 64 + 64)
        loss.backward()
        gradients.append(model.project.weight.grad.clone())
    assert torch.equal(*gradients)
    loss = model(x)
    with torch.no_grad():
        model.project.weight.add_(1.0)
    x.requires_grad_()
    loss = model(x)
    with torch.no_grad():
        model.project.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="was written into after the forward"):
        loss.backward()
