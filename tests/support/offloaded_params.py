"""Jobs whose parameters lie elsewhere, beside the same without offload."""

from dataclasses import replace
from functools import partial

from offload_cells import JOBS
from torch import nn
from training import Job, Outcome, bert, bert_batch, train

BASE = {"stage": 3, "bucket_bytes": "20KiB"}


def moved(params: str, optimizer: str, path: object, **more) -> dict:
    """Settings with parameters and optimizer state in these places."""
    offload = {"params": params, "optimizer": optimizer}
    if "nvme" in offload.values():
        offload["nvme_path"] = str(path)
    return {**BASE, "offload": offload, **more}


def checkpointing(model: nn.Module, use_reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


CLIPPED = replace(JOBS["clip and accumulation"], steps=3)
BERT = Job(make_model=bert, make_batch=bert_batch, steps=3, max_norm=100.0)
IN_TWO_PLACES = {
    "recomputed by hooks": replace(CLIPPED, steps=2, prepare=partial(checkpointing, use_reentrant=False)),
    "recomputed in a graph of its own": replace(CLIPPED, steps=2, prepare=partial(checkpointing, use_reentrant=True)),
    "bert with dropout": replace(BERT, model_arguments={"dropout": 0.1}),
}


def compared(rank: int, world_size: int, jobs: dict[str, Job], variants: list[dict], plain: dict) -> list[tuple]:
    """(job, settings, outcome, outcome without offload), in one process group."""
    found = []
    for name, job in jobs.items():
        expected = train(rank, world_size, replace(job, settings=plain))
        found += [(name, s, train(rank, world_size, replace(job, settings=s)), expected) for s in variants]
    return found


def assert_bitwise(found: list[tuple[str, dict, Outcome, Outcome]]) -> None:
    for name, settings, ours, theirs in found:
        assert ours.equals(theirs), f"{name}, {settings}: losses differ by {ours.loss_error(theirs)}"
        assert ours.norms == theirs.norms, f"{name}, {settings}"
