"""Ranks with different numbers of batches or tokens: trained as under DDP's Join, by the mean over all tokens."""

import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from cells import slow
from ranks import run_alone
from shared_ranks import run_on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader
from trainer_job import as_launched
from training import VOCABULARY, gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_zero import ZeroPlugin, ZeroTrainingArguments, engine_of


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(
    rank: int, world_size: int, zero: object, count: int = 18, max_norm: float = 100.0, epochs: int = 2, **more
) -> dict:
    """Losses of this rank's batches in each epoch, and the parameters that came of them."""
    as_launched(rank, world_size)
    plugin = None if zero is None else ZeroPlugin(zero)
    uneven = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(parallelism_config=plugin, dataloader_config=uneven)
    torch.manual_seed(0)
    model = gpt2(dropout=more.get("dropout", 0.0), layers=2)
    # Of three ranks, sums may be of another order, which AdamW shows where a gradient is nearly 0.
    kind = torch.optim.AdamW if world_size == 2 else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(count), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        # accelerate's own does nothing on a CPU.
        with Join([model]) if zero is None else accelerator.join_uneven_inputs([model]):
            for batch in loader:
                loss = model(**batch).loss
                if more.get("plain_backward"):
                    loss.backward()
                else:
                    accelerator.backward(loss)
                if max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "weights": {k: v.tolist() for k, v in weights.items()}}


@pytest.mark.parametrize(
    ("world_size", "count", "stages"), [(2, 18, (2, 3)), slow(2, 18, (0, 1)), slow(3, 17, (0, 1, 2, 3))]
)
def test_ranks_that_run_out_follow_the_others_as_under_ddps_join(world_size, count, stages):
    # One epoch: a rank that has run out under DDP leaves its own optimizer's state behind.
    stock = run_on_ranks(train, world_size, zero=None, count=count, max_norm=0.0, epochs=1)
    assert len({len(told["losses"]) for told in stock}) == 2, "uneven"
    for zero in stages:
        ours = run_on_ranks(train, world_size, zero=zero, count=count, max_norm=0.0, epochs=1)
        tolerance = 0.0 if world_size == 2 else 1e-6
        for told, theirs in zip(ours, stock):
            assert told["losses"] == pytest.approx(theirs["losses"], rel=tolerance, abs=0.0)
        for name, value in ours[0]["weights"].items():
            expected = torch.tensor(stock[0]["weights"][name])
            assert torch.allclose(torch.tensor(value), expected, rtol=0.0, atol=tolerance), name


@pytest.mark.slow
def test_it_goes_on_for_epochs_with_dropout_and_a_clip():
    ours = [
        run_on_ranks(train, zero=zero, max_norm=0.1, epochs=3, dropout=0.1, plain_backward=True) for zero in (0, 2, 3)
    ]
    assert [len(told["losses"]) for told in ours[0]] == [9, 6]
    for each in ours[1:]:
        for told, first in zip(each, ours[0]):
            assert told["losses"] == pytest.approx(first["losses"], rel=1e-5)


def scheduled(rank: int, world_size: int) -> dict:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(2), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = gpt2(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(rows(36), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    # By hand: accelerate's own accumulation ends with a rank's last batch.
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for number, batch in enumerate(loader):
            if number % 2 == 0:
                with accelerator.no_sync(model):
                    accelerator.backward(model(**batch).loss / 2)
                continue
            accelerator.backward(model(**batch).loss / 2)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    whole = [p.detach().sum().item() for p in model.parameters()]
    state = {k: v for k, v in scheduler.state_dict().items() if k in ("last_epoch", "_last_lr")}
    return {"whole": whole, "lr": optimizer.param_groups[0]["lr"], "state": state}


def test_micro_batches_and_schedulers_are_followed():
    first, second = run_on_ranks(scheduled)
    assert first == second


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def refused(rank: int, world_size: int, what: str) -> str:
    as_launched(rank, world_size)
    plugin = ZeroPlugin(stage=1, out_of_memory="halve" if what == "parts" else "stop")
    accelerator = Accelerator(parallelism_config=plugin)
    model = Normed() if what == "norm" else nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    joined = [object()] if what == "stranger" else [] if what == "nothing" else [model]
    try:
        with accelerator.join_uneven_inputs(joined, even_batches=False):
            for _ in range(2 - rank if what == "twice" else 2 * rank):
                loss = model(torch.ones(2, 4)).sum()
                if what == "twice":
                    loss = loss + model(torch.ones(2, 4)).sum()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("norm", "batch norms"),
        ("parts", "cannot be combined with `out_of_memory: halve`"),
        ("stranger", "not object"),
        ("nothing", "no model"),
        ("empty", "had no batch inside"),
        ("twice", "more than one forward"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(what, said):
    told = run_on_ranks(refused, what=what)
    assert any(re.search(said, each) for each in told), told


# ---- the mean over tokens ----

ROWS = 12
LENGTHS = 10
SEEDS = range(2)


def rows_left_out(seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of which very different shares count: from none of a row's tokens to all."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(ROWS):
        ids = torch.randint(VOCABULARY, (LENGTHS,), generator=generator)
        left_out = torch.rand(LENGTHS, generator=generator) < torch.rand((), generator=generator)
        made.append({"input_ids": ids, "labels": ids.masked_fill(left_out, -100)})
    return made


class KeepGradients(TrainerCallback):
    """Whole gradients as they are before the step."""

    def __init__(self):
        self.kept: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        is_sharded = getattr(args, "zero", None) is not None
        for name, parameter in model.named_parameters():
            gradient = engine_of(model).full_grad(parameter) if is_sharded else parameter.grad
            self.kept[name] = gradient.detach().clone().flatten()


def gradients(seed: int, folder: str, zero: str | None, per_device: int, micro_batches: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = gpt2(layers=2)
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": 1,
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "remove_unused_columns": False,
    }
    args = TrainingArguments(**settings) if zero is None else ZeroTrainingArguments(zero=zero, **settings)
    keeper = KeepGradients()
    Trainer(model=model, args=args, train_dataset=rows_left_out(seed), callbacks=[keeper]).train()
    return {name: gradient.tolist() for name, gradient in keeper.kept.items()}


def on_a_rank(rank: int, world_size: int, folder: str, zero: str, micro_batches: int) -> list[dict[str, list[float]]]:
    as_launched(rank, world_size)
    per_device = ROWS // (world_size * micro_batches)
    return [gradients(seed, folder, zero, per_device, micro_batches) for seed in SEEDS]


def in_one_process(folder: str) -> list[dict[str, list[float]]]:
    return [gradients(seed, folder, None, ROWS, 1) for seed in SEEDS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict[str, list[float]]]:
    """The gradients of one process that takes all rows of the step at once."""
    folder: Path = tmp_path_factory.mktemp("whole")
    return run_alone(in_one_process, time_limit_s=90, keyword_arguments={"folder": str(folder)})


@pytest.mark.short_cells("3-2-2")
@pytest.mark.parametrize(
    ("world_size", "zero", "micro_batches"),
    [(2, "1", 3), (2, "2", 1), (3, "2", 2), (2, "stage=3", 3), (2, "stage=2,grad_accumulation=local", 2)],
)
def test_gradients_are_those_of_one_process_with_the_whole_batch(tmp_path, whole, world_size, zero, micro_batches):
    everyones = run_on_ranks(
        on_a_rank, world_size=world_size, folder=str(tmp_path), zero=zero, micro_batches=micro_batches
    )
    for ours, theirs in zip(everyones[0], whole, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            assert torch.allclose(torch.tensor(gradient), torch.tensor(theirs[name]), rtol=1e-4, atol=1e-6), name
    assert everyones[0] == everyones[-1]
