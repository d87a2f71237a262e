"""Jobs and stages that are trained twice in one process group: with what is offloaded and without."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import Job, Outcome, Unruly, adamw_in_two_groups, bert, bert_batch, gpt2, gpt2_batch, train

SMALL_BUCKETS = {"bucket_bytes": "20KiB"}


def settings_of(stage: int, offload: dict, **more) -> dict:
    return {"stage": stage, **SMALL_BUCKETS, **offload, **more}


def sgd_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, nesterov=True)


def of_trained(make, model: nn.Module) -> torch.optim.Optimizer:
    return make([p for p in model.parameters() if p.requires_grad])


OPTIMIZERS = {
    "adamw": adamw_in_two_groups,
    "sgd momentum": sgd_momentum,
    "rmsprop": partial(of_trained, partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True)),
    "adagrad": partial(of_trained, partial(torch.optim.Adagrad, lr=1e-2)),
    "nadam": partial(of_trained, partial(torch.optim.NAdam, lr=1e-3)),
    "adam amsgrad": partial(of_trained, partial(torch.optim.Adam, lr=1e-3, amsgrad=True, foreach=True)),
}
GPT2 = Job(make_model=gpt2, make_batch=gpt2_batch)
JOBS = {
    "plain": replace(GPT2, model_arguments={"dropout": 0.1}),
    "clip and accumulation": replace(GPT2, max_norm=0.3, accumulation=2),
    "bert": Job(make_model=bert, make_batch=bert_batch, steps=3, max_norm=100.0),
    "odd model": Job(make_model=Unruly, steps=4, model_arguments={"sleeping": "even steps"}),
    **{name: replace(GPT2, make_optimizer=make) for name, make in OPTIMIZERS.items()},
}
CLIPPED = [("clip and accumulation", stage) for stage in range(4)]

# Each job is in the short run on two ranks in one of the two places, or on one rank in both: the places hold state in ways of
# their own, whoever steps it. In host memory one job is there at every stage.
HOST_OF_TWO_RANKS = CLIPPED
FILES_OF_TWO_RANKS = [("clip and accumulation", 3), ("odd model", 2), ("adam amsgrad", 1), ("nadam", 0)]
OF_ONE_RANK = [
    ("clip and accumulation", 3),
    ("sgd momentum", 2),
    ("adagrad", 1),
    ("bert", 3),
    ("adamw", 0),
    ("plain", 3),
    ("rmsprop", 3),
]


EVERY = [(name, stage) for name in JOBS for stage in range(4)]
FEW = [(name, stage) for name in ("clip and accumulation", "sgd momentum") for stage in range(4)]


def matrix(of_two_ranks: list[tuple[str, int]]) -> list[Any]:
    """World size and cells, each (job, stage), that the short run and the long one go through."""
    return [
        pytest.param(1, OF_ONE_RANK, id="1"),
        pytest.param(2, of_two_ranks, id="2"),
        pytest.param(1, EVERY, id="1-every", marks=pytest.mark.slow),
        pytest.param(2, EVERY, id="2-every", marks=pytest.mark.slow),
        pytest.param(3, FEW, id="3", marks=pytest.mark.slow),
    ]


def in_pairs(rank: int, world_size: int, cells: list[tuple[str, int]], offload: dict, **more):
    """(job, stage, without offload, with it), trained in one process group."""
    found = []
    for name, stage in cells:
        plain = train(rank, world_size, replace(JOBS[name], settings=settings_of(stage, {}, **more)))
        moved = train(rank, world_size, replace(JOBS[name], settings=settings_of(stage, offload, **more)))
        found.append((name, stage, plain, moved))
    return found


def clipped_at(*stages: int) -> list[tuple[str, int]]:
    return [("clip and accumulation", stage) for stage in stages]


def assert_equal(found: list[tuple[str, int, Outcome, Outcome]]) -> None:
    for name, stage, plain, moved in found:
        assert moved.equals(plain), f"{name}, stage {stage}: losses differ by {moved.loss_error(plain)}"
        assert moved.norms == plain.norms, f"{name}, stage {stage}"
        assert not np.isnan(moved.losses).any()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(**gpt2_batch(torch.Generator().manual_seed(0), 2)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
