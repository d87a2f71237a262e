"""Where state, parameters and activations are changes no digit: runs elsewhere, beside the same run in device memory."""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from cells import marks_of
from scaled_runs import OVERFLOWS, muon_and_adamw
from scaled_runs import train as train_scaled
from shared_ranks import on_ranks
from torch import nn
from training import ELEMENTWISE, Job, Unruly, adamw_in_two_groups, bert, bert_batch, checkpoint_activations, train

pytestmark = pytest.mark.timeout(180)

SMALL_BUCKETS = {"bucket_bytes": "20KiB"}
HOST, FILES, SAVED = {"optimizer": "cpu"}, {"optimizer": "nvme"}, {"activations": "cpu"}
LOCAL, BF16, FLOAT16 = {"grad_accumulation": "local"}, {"param_dtype": "bfloat16"}, {"param_dtype": "float16"}
IN_BLOCKS = {"gradients": "int8", "weights": "int8"}
GROUPS, NEAR = {"shard_group_size": 2, "node_size": 2}, {"secondary_shard": "node", "node_size": 2}


def checkpointing(model: nn.Module, use_reentrant: bool) -> None:
    checkpoint_activations(model, {"use_reentrant": use_reentrant})


CLIPPED = Job(max_norm=0.3, accumulation=2)
BERT = Job(make_model=bert, make_batch=bert_batch, max_norm=100.0)
DROPOUT = {"model_arguments": {"dropout": 0.1}}
JOBS = {
    "plain": Job(**DROPOUT),
    "clipped": CLIPPED,
    "bert": BERT,
    "odd": Job(make_model=Unruly, steps=4, model_arguments={"sleeping": "even steps"}),
    "adamw": Job(make_optimizer=adamw_in_two_groups),
    **{name: Job(make_optimizer=ELEMENTWISE[name]) for name in ("sgd", "rmsprop", "adagrad", "nadam", "adam amsgrad")},
}
ELSEWHERE_JOBS = {
    "clipped": CLIPPED,
    "odd": JOBS["odd"],
    "sgd": replace(JOBS["sgd"], steps=2),
    "recomputed by hooks": replace(CLIPPED, steps=2, prepare=partial(checkpointing, use_reentrant=False)),
    "recomputed in a graph of its own": replace(CLIPPED, steps=2, prepare=partial(checkpointing, use_reentrant=True)),
    "bert with dropout": replace(BERT, **DROPOUT),
}
SAVING_JOBS = ELSEWHERE_JOBS | {
    "dropping": replace(CLIPPED, steps=2, **DROPOUT),
    "bert": replace(BERT, steps=2, autocast=True),
}
ONCE_CLIPPED = Job(accumulation=2, max_norm=0.5)
MUON = Job(make_optimizer=muon_and_adamw, max_norm=0.5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run in device memory, and in each of some places of `offload`."""

    places: list[dict]
    job: Job = CLIPPED
    stage: int = 3
    settings: dict = field(default_factory=dict)


def elsewhere(params: str, optimizer: str) -> dict:
    return {"params": params, "optimizer": optimizer}


ALIKE = [elsewhere("cpu", "cpu"), elsewhere("nvme", "nvme")]
PAIRS = [elsewhere(*pair) for pair in itertools.product(("cpu", "nvme"), ("none", "cpu", "nvme"))]
MIXED = [pair for pair in PAIRS if pair not in ALIKE]
TWO_MIXED = [elsewhere("cpu", "none"), elsewhere("nvme", "cpu")]
PARTS = [place | {"ratio": 0.4} for place in (HOST, FILES)]


def at_stages(stages: tuple[int, ...], *places: dict, **settings) -> list[Case]:
    return [Case(places=list(places), stage=stage, settings=settings) for stage in stages]


def of_jobs(cells: list[tuple[str, int]], *places: dict) -> list[Case]:
    return [Case(job=JOBS[name], places=list(places), stage=stage) for name, stage in cells]


def of_parameters(names: list[str], pairs: list[dict]) -> list[Case]:
    return [Case(places=pairs), *(Case(job=ELSEWHERE_JOBS[name], places=ALIKE) for name in names)]


def of_activations(names: list[str], stage: int, *, beside: bool = False) -> list[Case]:
    places = [SAVED, *([SAVED | ALIKE[0]] if beside else [])]
    return [Case(job=SAVING_JOBS[name], places=places, stage=stage) for name in names]


def on_the_wire(comm: dict, *places: dict, job: Job = ONCE_CLIPPED, **settings) -> list[Case]:
    return [Case(job=job, places=list(places or ALIKE), settings={"comm": comm, **settings})]


EVERY = list(itertools.product(JOBS, range(4)))
FEW = list(itertools.product(("clipped", "sgd"), range(4)))
MANY = ["recomputed by hooks", "recomputed in a graph of its own", "bert with dropout", "dropping", "bert", "odd"]
OTHERWISE = [
    Case(job=replace(CLIPPED, steps=2), places=ALIKE, settings=LOCAL),
    *(Case(job=replace(CLIPPED, steps=2), places=ALIKE, settings={"prefetch_units": ahead}) for ahead in (0, 3)),
    Case(job=replace(CLIPPED, steps=2), places=ALIKE, settings={"reshard_after_forward": False}),
    Case(job=replace(CLIPPED, steps=2), places=PAIRS, settings=BF16),
]

# (name, ranks, cases). In the short run each job is on two ranks in one of the two places of state, or on one rank in both: the
# places hold state in ways of their own, whoever steps it. In host memory one job is there at every stage.
SHORT = [
    (
        "state",
        1,
        of_jobs(
            [("clipped", 3), ("sgd", 2), ("adagrad", 1), ("bert", 3), ("adamw", 0), ("plain", 3), ("rmsprop", 3)],
            HOST,
            FILES,
        ),
    ),
    (
        "state in files",
        2,
        [
            *of_jobs([("clipped", 3), ("odd", 2), ("adam amsgrad", 1), ("nadam", 0)], FILES),
            *at_stages((3,), FILES, **BF16),
        ],
    ),
    ("parameters", 2, of_parameters(["odd"], MIXED)),
    ("whole parameters", 2, on_the_wire({}, job=MUON)),
    (
        "activations",
        2,
        [
            *of_activations(["odd"], 2),
            *of_activations(["dropping"], 3, beside=True),
            *of_activations(["recomputed by hooks"], 3),
        ],
    ),
]
LONG = [
    *((f"{name}, every job and stage", 2, of_jobs(EVERY, place)) for name, place in (("host", HOST), ("files", FILES))),
    *(("state of few jobs", ranks, of_jobs(FEW, HOST, FILES)) for ranks in (1, 3)),
    *(
        (f"state with {name}", ranks, at_stages((1, 2, 3), HOST, FILES, **more))
        for name, more in (("local accumulation", LOCAL), ("masters", BF16))
        for ranks in (1, 2)
    ),
    *(
        ("a part of the state", ranks, [*at_stages(stages, *PARTS), *at_stages(stages[-1:], PARTS[0], **BF16)])
        for ranks, stages in ((1, (0, 2, 3)), (2, (1, 3)), (3, (2, 3)))
    ),
    ("parameters of every job", 1, of_parameters(list(ELSEWHERE_JOBS)[1:], TWO_MIXED)),
    ("parameters in every pair of places", 2, of_parameters(["odd", "sgd"], PAIRS)),
    ("parameters", 3, of_parameters(["odd", "sgd"], TWO_MIXED)),
    *(("parameters with other settings", ranks, OTHERWISE) for ranks in (1, 2)),
    ("parameters in blocks on the wire", 2, on_the_wire(IN_BLOCKS)),
    ("parameters in blocks and two places", 2, on_the_wire(IN_BLOCKS, *TWO_MIXED)),
    ("parameters in 8 bits", 2, on_the_wire({"gradients": "int8"})),
    ("parameters in blocks, bf16", 2, on_the_wire(IN_BLOCKS, **BF16)),
    ("parameters in blocks, local accumulation", 2, on_the_wire(IN_BLOCKS, ALIKE[0], **LOCAL)),
    ("whole parameters in blocks", 2, on_the_wire(IN_BLOCKS, job=MUON)),
    ("parameters of groups", 4, on_the_wire(GROUPS)),
    ("parameters of groups in blocks", 4, on_the_wire(GROUPS | IN_BLOCKS)),
    ("whole parameters of groups", 4, on_the_wire(GROUPS, ALIKE[0], job=MUON)),
    ("secondary shards", 4, on_the_wire(NEAR)),
    ("secondary shards in blocks", 4, on_the_wire(NEAR | IN_BLOCKS, ALIKE[0])),
    *(
        (
            "activations of every job",
            ranks,
            [
                *of_activations(MANY, 0),
                *(case for stage in (1, 2) for case in of_activations(["dropping", "bert with dropout"], stage)),
                *of_activations(MANY, 3, beside=True),
            ],
        )
        for ranks in (1, 2)
    ),
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [pytest.param(*cell, id=f"{name}-{cell[0]}", marks=marks_of(name)) for name, *cell in SHORT]
    + [
        pytest.param(*cell, id=f"{name}-{cell[0]}-long", marks=[pytest.mark.slow, *marks_of(name)])
        for name, *cell in LONG
    ],
)
@on_ranks()
def test_no_digit_depends_on_where_what_is(rank, world_size, cases, tmp_path):
    for case in cases:
        settings = {"stage": case.stage, **SMALL_BUCKETS, **case.settings}
        here = train(rank, world_size, replace(case.job, settings=settings))
        assert not np.isnan(here.losses).any()
        for place in case.places:
            there = train(
                rank, world_size, replace(case.job, settings={**settings, "offload": with_path(place, tmp_path)})
            )
            assert there.equals(here), f"{case}, {place}: losses differ by {there.loss_error(here)}"
            assert there.norms == here.norms, f"{case}, {place}"


def with_path(place: dict, path: object) -> dict:
    return place | ({"nvme_path": str(path)} if "nvme" in place.values() else {})


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks()
def test_losses_are_scaled_and_steps_skipped_the_same_with_parameters_elsewhere(rank, world_size, tmp_path):
    for more, autocast in (({}, True), (FLOAT16, False), ({**FLOAT16, "comm": IN_BLOCKS}, False)):
        how = {"autocast": autocast, "max_norm": 1e3, "steps": 7}
        settings = {"stage": 3, **SMALL_BUCKETS, **more}
        here = train_scaled(rank, settings, **how)
        assert here.skipped == [OVERFLOWS.get(step, world_size) < world_size for step in range(7)]
        for place in ALIKE:
            there = train_scaled(rank, {**settings, "offload": with_path(place, tmp_path)}, **how)
            assert there.equals(here), (more, place)
