"""A Trainer on forked ranks, one step long, as `accelerate launch` would have it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from transformers import Trainer, TrainerCallback, TrainingArguments
from workload import WORKLOADS


def make_trainer(
    rank: int,
    world_size: int,
    *,
    model: str,
    stage: int | str | None,
    folder: str,
    callbacks: Iterable[TrainerCallback] = (),
    saves: bool = False,
) -> Trainer:
    """A Trainer of plain DDP (`stage` of None) or of the engine; one training step long, and with `saves` one checkpoint."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")
    workload = WORKLOADS[model]
    data = [{"input_ids": row, "labels": row} for row in workload.make_batch(0, 0)[:, :16].repeat(8, 1)]
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        max_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps" if saves else "no",
        save_steps=1,
    )
    callbacks = list(callbacks)
    if stage is not None:
        from hf_zero import ZeroCallback

        callbacks.append(ZeroCallback(stage))
    return Trainer(model=workload.make_model(), args=arguments, train_dataset=data, callbacks=callbacks)
