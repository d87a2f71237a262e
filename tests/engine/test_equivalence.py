"""One loss trajectory: every stage, world size, accumulation, dtype and odd model follows DDP."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cells import slow
from ddp_outcomes import assert_bitwise, assert_close, checkpoint_activations, outcomes
from ranks import run_ranks
from shared_ranks import shared_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import (
    VOCABULARY,
    Answer,
    Job,
    Outcome,
    Unruly,
    adamw_in_two_groups,
    bert,
    bert_batch,
    gpt2,
    gpt2_batch,
)
from transformers import BertForQuestionAnswering

from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(180)

SMALL_BUCKETS = "20KiB"
STAGES = [{"stage": stage, "bucket_bytes": SMALL_BUCKETS} for stage in (0, 1, 2, 3)]
LOCAL = {"stage": 2, "bucket_bytes": SMALL_BUCKETS, "grad_accumulation": "local"}
LOCAL_3 = {**LOCAL, "stage": 3}
# In one bucket, and with parameters that stay whole until the step.
OTHERWISE = [
    {"stage": 2, "bucket_bytes": "1GiB"},
    {"stage": 3, "bucket_bytes": SMALL_BUCKETS, "reshard_after_forward": False, "prefetch_units": 2},
]
BERT = Job(make_model=bert, make_batch=bert_batch)
GPT2 = Job(make_model=gpt2, make_batch=gpt2_batch)


CHANGES = {
    "norm below the clip": {"max_norm": 100.0},
    "unfused AdamW": {"make_optimizer": adamw_in_two_groups},
    "dropout": {"model_arguments": {"dropout": 0.1}},
    "uneven last batch": {"uneven_last_batch": True},
}
# In the short run; what one model shows of a setting, the other shows once more in the long one.
STAGES_OF_CHANGE = {
    "norm below the clip": STAGES[2:3],
    "unfused AdamW": STAGES[3:],
    "dropout": STAGES[3:],
    "uneven last batch": STAGES[::2],
}


@pytest.mark.parametrize(
    ("job", "change", "variants"),
    [
        pytest.param(BERT, {}, [*STAGES, *OTHERWISE], id="plain-bert"),
        pytest.param(GPT2, {}, [*STAGES, *OTHERWISE], id="plain-gpt2"),
        *(pytest.param(GPT2, CHANGES[name], stages, id=f"{name}-gpt2") for name, stages in STAGES_OF_CHANGE.items()),
        *(slow(GPT2, change, STAGES, id=f"{name}-gpt2-every-stage") for name, change in CHANGES.items()),
        *(slow(GPT2, change, OTHERWISE, id=f"{name}-gpt2-otherwise") for name, change in CHANGES.items()),
        *(slow(BERT, change, [*STAGES, *OTHERWISE], id=f"{name}-bert") for name, change in CHANGES.items()),
    ],
)
@pytest.mark.short_cells("plain-gpt2", "uneven last batch-gpt2", "dropout-gpt2")
def test_bitwise_at_two_ranks(job, change, variants):
    assert_bitwise(replace(job, **change), variants)


@pytest.mark.parametrize(
    ("accumulation", "job"),
    [
        pytest.param(2, BERT, id="2-bert"),
        slow(4, GPT2, id="4-gpt2"),
        slow(4, BERT, id="4-bert"),
        slow(2, GPT2, id="2-gpt2"),
    ],
)
def test_local_accumulation_is_bitwise(accumulation, job):
    assert_bitwise(replace(job, accumulation=accumulation), [*STAGES[:2], LOCAL, LOCAL_3])


@pytest.mark.parametrize("accumulation", [2, slow(4)])
def test_sharded_accumulation_is_close(accumulation):
    assert_close(replace(GPT2, accumulation=accumulation, max_norm=0.5), STAGES[2:])


@pytest.mark.parametrize("job", [slow(BERT), GPT2], ids=["bert", "gpt2"])
def test_biting_clip_is_close(job):
    assert_close(replace(job, max_norm=0.3), STAGES)


@pytest.mark.parametrize(
    ("world_size", "job", "variants"),
    [
        pytest.param(3, BERT, STAGES[1::2], id="3-bert"),
        slow(3, BERT, [*STAGES, LOCAL], id="3-bert-every-stage"),
        slow(3, GPT2, [*STAGES, LOCAL], id="3-gpt2"),
        slow(4, BERT, [*STAGES, LOCAL], id="4-bert"),
        slow(4, GPT2, [*STAGES, LOCAL], id="4-gpt2"),
    ],
)
def test_more_ranks_are_close(world_size, job, variants):
    assert_close(replace(job, max_norm=0.5, accumulation=2), variants, world_size)


@pytest.mark.parametrize(
    ("job", "stages"),
    [
        pytest.param(replace(GPT2, max_norm=100.0), STAGES[2:], id="gpt2"),
        slow(replace(GPT2, max_norm=100.0), STAGES, id="gpt2-every-stage"),
        slow(BERT, STAGES, id="bert"),
    ],
)
def test_autocast_is_close(job, stages):
    assert_close(replace(job, autocast=True), stages)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-3),
    "adam amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
}


def of_all_parameters(make, model: nn.Module) -> torch.optim.Optimizer:
    return make([p for p in model.parameters() if p.requires_grad])


# One stage each in the short run, in turn: what an optimizer computes is the same at all of them.
ONE_STAGE_EACH = [(name, [STAGES[1 + number % 3]]) for number, name in enumerate(OPTIMIZERS)]


@pytest.mark.parametrize(
    ("name", "stages"), [*ONE_STAGE_EACH, *(slow(name, STAGES[1:], id=f"{name}-every-stage") for name in OPTIMIZERS)]
)
@pytest.mark.short_cells("sgd-stages0", "adagrad-stages2", "adam amsgrad-stages5", "adamw foreach-stages6")
def test_elementwise_optimizers_are_bitwise(name, stages):
    make = partial(of_all_parameters, OPTIMIZERS[name])
    assert_bitwise(replace(GPT2, make_optimizer=make), stages)


@pytest.mark.parametrize("sleeping", [slow("none"), "odd ranks", "even steps"])
@pytest.mark.short_cells("odd ranks")
def test_unused_twice_used_tied_and_frozen_parameters_are_bitwise(sleeping):
    job = Job(make_model=Unruly, model_arguments={"sleeping": sleeping}, find_unused=True, batch_size=4, steps=4)
    # A gather is collective, so a layer that only some ranks visit must be kept whole.
    kept = {"persist_below_numel": 600} if sleeping == "odd ranks" else {}
    stages = [*STAGES[:3], {**STAGES[3], **kept}]
    assert_bitwise(job, stages)
    assert_bitwise(replace(job, accumulation=2), [*STAGES[:2], LOCAL, {**stages[3], "grad_accumulation": "local"}])


class NoGradient(torch.autograd.Function):
    """Returns its input, whose gradient it leaves undefined."""

    @staticmethod
    def forward(_ctx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx, _gradient: torch.Tensor) -> None:
        return None


class Undefined(nn.Module):
    """Layers behind which a gradient ends undefined: always, on odd ranks, or in every other forward."""

    def __init__(self, when: str = "always", reentrant: bool | None = None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.side = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2))
        self.large = nn.Linear(24, 2400)
        self.layer = nn.Linear(24, 24)
        self.head = nn.Linear(24, VOCABULARY)
        self.when, self.reentrant = when, reentrant
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        self.calls += 1
        rank = torch.distributed.get_rank()
        ends = {"always": True, "odd ranks": rank % 2 == 1, "odd forwards": self.calls % 2 == 1}[self.when]
        embedded = self.embed(input_ids).mean(1)
        hidden = embedded
        for layer in self.side:
            hidden = (
                layer(hidden) if self.reentrant is None else checkpoint(layer, hidden, use_reentrant=self.reentrant)
            )
        beside = hidden + self.large(hidden).view(-1, 100, 24).mean(1)
        hidden = self.layer(embedded) + (NoGradient.apply(beside) if ends else beside)
        return Answer(nn.functional.cross_entropy(self.head(hidden), labels[:, 0]))


UNDEFINED = [{"stage": stage, "bucket_bytes": "3KiB"} for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("when", "accumulation", "reentrant"),
    [("always", 1, None), ("odd ranks", 1, False), ("odd forwards", 2, None), ("always", 2, True)],
)
def test_undefined_gradients_are_bitwise(when, accumulation, reentrant):
    job = Job(make_model=Undefined, model_arguments={"when": when, "reentrant": reentrant}, accumulation=accumulation)
    local = {"grad_accumulation": "local"} if accumulation > 1 else {}
    assert_bitwise(job, [{**settings, **local} for settings in UNDEFINED])
    if when == "odd ranks":
        offloaded = {**UNDEFINED[3], "offload": {"optimizer": "cpu", "params": "cpu"}}
        assert_bitwise(job, [{**UNDEFINED[2], "offload": {"optimizer": "cpu"}}, offloaded])
    if accumulation > 1:
        assert_close(job, UNDEFINED[2:])


def of_found_unused_parameters(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    """Parameters after two steps under DDP and at each stage, where parameters without gradients are not stepped."""
    found = []
    for settings in (None, *UNDEFINED):
        torch.manual_seed(0)
        model = entry = Undefined()
        optimizer = adamw_in_two_groups(model)
        if settings is None:
            entry = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            engine = ZeroEngine(model, [optimizer], settings, find_unused_parameters=True)
        for step in range(2):
            entry(**gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if settings is not None:
            engine.close()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def test_where_unused_parameters_are_found_an_undefined_gradient_is_none():
    for expected, *found in shared_ranks.run(of_found_unused_parameters):
        for stage, parameters in enumerate(found):
            assert all(map(torch.equal, parameters, expected)), f"stage {stage}"


@pytest.mark.parametrize(
    ("job", "reentrant", "stages"),
    [
        # Stage 3 with BERT, test_families.py has.
        pytest.param(BERT, False, STAGES[1:2], id="bert-non-reentrant"),
        pytest.param(GPT2, True, STAGES[2:], id="gpt2-reentrant"),
        *(slow(BERT, reentrant, STAGES, id=f"bert-{reentrant}-every-stage") for reentrant in (False, True)),
        *(slow(GPT2, reentrant, STAGES, id=f"gpt2-{reentrant}-every-stage") for reentrant in (False, True)),
    ],
)
@pytest.mark.short_cells("gpt2-reentrant")
def test_activation_checkpointing_is_bitwise(job, reentrant, stages):
    assert_bitwise(replace(job, prepare=partial(checkpoint_activations, reentrant=reentrant)), stages)


class InSegments(nn.Module):
    """Four layers in two checkpoints: what is recomputed and what runs backward are not the same layer."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(24, VOCABULARY)
        self.reentrant = reentrant

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.embed(input_ids)
        for segment in (self.layers[:2], self.layers[2:]):
            hidden = checkpoint(partial(self.through, segment), hidden, use_reentrant=self.reentrant)
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))

    @staticmethod
    def through(segment: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
        for layer in segment:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.mark.parametrize("reentrant", [False, slow(True)], ids=["non-reentrant", "reentrant"])
def test_several_layers_in_one_checkpoint_are_bitwise(reentrant):
    job = replace(GPT2, make_model=InSegments, model_arguments={"reentrant": reentrant})
    assert_bitwise(job, [{"stage": 3, "bucket_bytes": SMALL_BUCKETS, "prefetch_units": n} for n in (0, 1, 2)])


class TwiceCheckpointed(nn.Module):
    """A layer in two reentrant checkpoints: its gradient comes in two inner backward passes, which DDP refuses."""

    def __init__(self, checkpointing: bool):
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, 97)
        self.checkpointing = checkpointing

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids % 97)
        for _ in range(3):
            if self.checkpointing:
                hidden = checkpoint(lambda h: torch.tanh(self.layer(h)), hidden, use_reentrant=True)
            else:
                hidden = torch.tanh(self.layer(hidden))
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten() % 97))


CHECKPOINTED = [(bucket_bytes, stage) for bucket_bytes in (1000, "1GiB") for stage in range(4)]


def checkpointed_and_plain(rank: int, world_size: int) -> list[list[Outcome]]:
    """(without checkpoints, with them) of each of CHECKPOINTED."""
    from training import train

    found = []
    for bucket_bytes, stage in CHECKPOINTED:
        job = Job(make_model=TwiceCheckpointed, settings={"stage": stage, "bucket_bytes": bucket_bytes}, steps=2)
        arguments = ({"checkpointing": on} for on in (False, True))
        found.append([train(rank, world_size, replace(job, model_arguments=each)) for each in arguments])
    return found


@pytest.fixture(scope="module")
def twice_checkpointed() -> list[list[list[Outcome]]]:
    return run_ranks(checkpointed_and_plain, world_size=2, time_limit_s=150)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1000, "1GiB"])
def test_parameter_in_several_reentrant_checkpoints_loses_no_gradient(stage, bucket_bytes, twice_checkpointed):
    for cells in twice_checkpointed:
        plain, checkpointed = cells[CHECKPOINTED.index((bucket_bytes, stage))]
        assert checkpointed.loss_error(plain) <= 1e-5
        for name, value in plain.tensors.items():
            assert np.allclose(value, checkpointed.tensors[name], rtol=1e-4, atol=1e-6), name


def to_bf16(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def bf16_reference(rank: int, world_size: int, steps: int) -> list[float]:
    """One process, both ranks' batches: bf16 gradients halved, summed in fp32, AdamW on an fp32 master."""
    torch.manual_seed(0)
    model = gpt2().to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    matrices = [m for m in masters if m.dim() > 1]
    others = [m for m in masters if m.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    generators = [torch.Generator().manual_seed(100 + r) for r in range(world_size)]
    losses = []
    for _ in range(steps):
        sums = [torch.zeros_like(m) for m in masters]
        for r, generator in enumerate(generators):
            loss = model(**gpt2_batch(generator, 2)).loss
            loss.backward()
            if r == rank:
                losses.append(loss.item())
            for total, p in zip(sums, model.parameters()):
                total += p.grad / world_size
                p.grad = None
        for master, total in zip(masters, sums):
            master.grad = total
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters):
                p.copy_(master)
    return losses


def bf16_engines_and_reference(rank: int, world_size: int) -> tuple[list[list[float]], list[float]]:
    """Losses at each stage, and those of one process."""
    from training import train

    found = []
    for stage in range(4):
        # Stages 1 to 3 add what arrives in bf16 in the master's fp32. Stage 0's all-reduce adds in the dtype that travels.
        travels = {"reduce_dtype": "float32"} if stage == 0 else {}
        settings = {"stage": stage, "bucket_bytes": SMALL_BUCKETS, **travels}
        found.append(train(rank, world_size, replace(GPT2, prepare=to_bf16, settings=settings, steps=4)).losses)
    return found, bf16_reference(rank, world_size, 4)


@pytest.fixture(scope="module")
def in_bf16() -> list[tuple[list[list[float]], list[float]]]:
    return run_ranks(bf16_engines_and_reference, world_size=2, time_limit_s=150)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_parameters_with_fp32_master_follow_a_single_process(stage, in_bf16):
    for engines, reference in in_bf16:
        assert np.allclose(engines[stage], reference, rtol=1e-5, atol=0)


def answering(dropout: float = 0.0) -> nn.Module:
    """BERT that marks the answer in a text. Its scores go through a softmax over the text, which their bias does not change."""
    config = bert(dropout).config
    config.num_labels = 2
    return BertForQuestionAnswering(config)


def question_batch(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = bert_batch(generator, size)["input_ids"]
    marks = torch.randint(ids.shape[1], (2, size), generator=generator)
    return {"input_ids": ids, "start_positions": marks[0], "end_positions": marks[1]}


@pytest.mark.parametrize("clips", [slow(False), True])
def test_a_bias_whose_true_gradient_is_zero_walks_with_the_rounding_of_the_clip_and_nothing_else_does(clips):
    # Adam makes a full step of rounding noise. Clipping by a norm whose last digit differs from DDP's changes that noise.
    job = Job(make_model=answering, make_batch=question_batch, max_norm=0.5 if clips else None)
    for _, expected, found in outcomes(job, [{"stage": 2}, {"stage": 3}]):
        apart = {
            name: np.abs(found.tensors[name] - expected.tensors[name]).max()
            for name in found.parameter_names
            if not np.array_equal(found.tensors[name], expected.tensors[name])
        }
        assert clips or not apart
        assert np.allclose(found.losses, expected.losses, rtol=1e-6, atol=0)
        # All add the same to each score of a text, keys' biases to each score of an attention.
        shifts = ("qa_outputs.bias", "key.bias", "layer.2.output.LayerNorm.bias")
        assert not {name: off for name, off in apart.items() if off > 1e-5 and not name.endswith(shifts)}
