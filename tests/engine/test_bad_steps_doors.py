"""`nonfinite: skip` through Trainer and accelerate: schedulers wait, and training ends as it should."""

import pytest
import torch
from accelerate_job import make_accelerator
from ranks import run_ranks
from shared_ranks import on_ranks
from torch.utils.data import DataLoader
from trainer_job import as_launched, make_trainer
from training import gpt2, gpt2_batch
from transformers import Trainer

from hf_zero import engine_of

pytestmark = pytest.mark.timeout(120)


class PoisonedTrainer(Trainer):
    """Its loss is NaN in the third step, on the last rank."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_bad = self.state.global_step == 2 and self.args.process_index == self.args.world_size - 1
        return found * float("nan") if is_bad and not return_outputs else found


def through_trainer(rank: int, world_size: int, output_dir: str) -> dict:
    as_launched(rank, world_size)
    trainer = make_trainer(
        "flag stage=2,nonfinite=skip", "gpt2", output_dir, trainer_class=PoisonedTrainer, max_steps=5, warmup_steps=0
    )
    trainer.train()
    engine = engine_of(trainer)
    return {
        "steps": trainer.state.global_step,
        "scheduled": trainer.lr_scheduler.last_epoch,
        "skipped": engine.bad_steps.skipped,
        "finite": all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters()),
    }


def test_trainer_goes_on_and_its_schedule_waits(tmp_path):
    expected = {"steps": 5, "skipped": 1, "finite": True}
    for outcome in run_ranks(
        through_trainer,
        world_size=2,
        time_limit_s=90,
        keyword_arguments={"output_dir": str(tmp_path)},
    ):
        # Trainer counts a step more than the schedule, as behind an overflow in float16.
        assert outcome == {**expected, "scheduled": 4}


@on_ranks(2)
def test_accelerate_tells_of_a_skipped_step_and_its_scheduler_waits(rank, world_size):
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin stage=1,nonfinite=skip", cpu=True)
    torch.manual_seed(0)
    model = gpt2(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    loader = DataLoader(list(range(8 * world_size)))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    rates, skipped = [], []
    for number, _ in zip(range(4), loader):
        loss = model(**gpt2_batch(torch.Generator().manual_seed(number), 2)).loss
        accelerator.backward(loss * float("nan") if number == 1 and rank == 1 else loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, True, False, False]
    assert rates == [0.1 * 0.5 ** (2 * steps) for steps in (1, 1, 2, 3)]
