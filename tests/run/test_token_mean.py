"""The mean over all tokens of a step is the same for any number of ranks and micro-batches, with labels left out at random."""

from pathlib import Path

import pytest
import torch
from ranks import run_alone, run_ranks
from trainer_job import as_launched
from training import VOCABULARY, gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_zero import ZeroTrainingArguments, engine_of

ROWS = 12
LENGTHS = 10
SEEDS = range(2)


def rows(seed: int) -> list[dict[str, torch.Tensor]]:
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
    Trainer(model=model, args=args, train_dataset=rows(seed), callbacks=[keeper]).train()
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
    told = {"folder": str(tmp_path), "zero": zero, "micro_batches": micro_batches}
    everyones = run_ranks(on_a_rank, world_size=world_size, time_limit_s=90, keyword_arguments=told)
    for ours, theirs in zip(everyones[0], whole, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            assert torch.allclose(torch.tensor(gradient), torch.tensor(theirs[name]), rtol=1e-4, atol=1e-6), name
    assert everyones[0] == everyones[-1]
