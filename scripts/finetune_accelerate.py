"""The task of `finetune_bert.py` as a plain accelerate loop. Only the plugin argument adds a ZeRO engine.

    accelerate launch scripts/finetune_accelerate.py --zero 2 --checkpointing_steps 100
    accelerate launch scripts/finetune_accelerate.py --zero 2 --resume_from_checkpoint outputs/accelerate/step_100
    torchrun --nnodes 2:4 --max-restarts 10 ... scripts/finetune_accelerate.py --zero 2 --checkpointing_steps 100 \
        --resume_from_checkpoint auto --global_batch_size 96

The last command continues by itself after a restart, on any number of ranks: from the newest good state, with the same samples
per step.

Without `--zero` it runs under stock DDP.
"""

import math
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import finetuning
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from finetune_bert import load_model
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import DataCollatorWithPadding, get_scheduler, set_seed
from transformers.hf_argparser import HfArg

from hf_zero import ZeroPlugin, engine_of, init, last_good_state, same_global_batch

FROM_SCRATCH = {"learning_rate": 1e-3, "num_train_epochs": 8, "per_device_train_batch_size": 16, "num_warmup_steps": 40}


@dataclass
class LoopArguments:
    """Settings of the training. Batch sizes are per process."""

    zero: str | None = HfArg(default=None, help="A stage (0, 1, 2, 3) or a yaml file. Unset: stock DDP.")
    output_dir: str = HfArg(default="outputs/accelerate", help="Where model and checkpoints go.")
    per_device_train_batch_size: int = HfArg(default=8, help="Rows of a training batch.")
    per_device_eval_batch_size: int = HfArg(default=64, help="Rows of an evaluation batch.")
    gradient_accumulation_steps: int = HfArg(default=1, help="Batches that make up one step.")
    global_batch_size: int | None = HfArg(
        default=None, help="Rows of a step on all ranks together, by accumulation and smaller batches where need be."
    )
    num_train_epochs: int = HfArg(default=3, help="Passes over the training data.")
    learning_rate: float = HfArg(default=5e-5, help="Highest learning rate, after the warm-up.")
    weight_decay: float = HfArg(default=0.0, help="AdamW's weight decay.")
    max_grad_norm: float = HfArg(default=1.0, help="Gradients are scaled down to this norm.")
    lr_scheduler_type: str = HfArg(default="linear", help="Name of a transformers schedule.")
    num_warmup_steps: int = HfArg(default=0, help="Steps over which the learning rate rises.")
    seed: int = HfArg(default=42, help="For weights, data order and dropout.")
    checkpointing_steps: int | None = HfArg(default=None, help="Save the whole state every so many steps.")
    resume_from_checkpoint: str | None = HfArg(default=None, help="A folder `step_…` to go on from, or auto.")


def train(accelerator, run, model, optimizer, scheduler, loader, first_step) -> dict[str, float]:
    """Trains from step `first_step` on; returns the mean loss and the speed."""
    steps_per_epoch = math.ceil(len(loader) / run.gradient_accumulation_steps)
    first_epoch, steps_done = divmod(first_step, steps_per_epoch)
    step, total = first_step, steps_per_epoch * run.num_train_epochs
    bar = tqdm(total=total, initial=step, disable=not accelerator.is_local_main_process, dynamic_ncols=True)
    # Sum of losses and number of samples, kept on the device: reading them at every step would make the host wait for the device.
    seen, started = torch.zeros(2, device=accelerator.device), time.perf_counter()

    model.train()
    for epoch in range(first_epoch, run.num_train_epochs):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == first_epoch and steps_done:
            batches = accelerator.skip_first_batches(loader, steps_done * run.gradient_accumulation_steps)
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), run.max_grad_norm)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            rows = len(batch["labels"])
            seen += torch.stack([loss.detach() * rows, torch.tensor(float(rows), device=accelerator.device)])
            if accelerator.sync_gradients:
                step += 1
                bar.update()
                if run.checkpointing_steps and step % run.checkpointing_steps == 0:
                    accelerator.save_state(str(Path(run.output_dir, f"step_{step}")))
    bar.close()

    loss_sum, rows = accelerator.reduce(seen, reduction="sum").tolist()
    seconds = time.perf_counter() - started
    return {"train_loss": loss_sum / max(rows, 1), "train_seconds": seconds, "train_samples_per_second": rows / seconds}


@torch.no_grad()
def evaluate(accelerator, model, loader) -> float:
    """Returns the share of samples whose most likely class is the right one."""
    model.eval()
    hits = []
    for batch in tqdm(loader, desc="Evaluating", disable=not accelerator.is_local_main_process):
        hit = model(**batch).logits.argmax(dim=-1) == batch["labels"]
        hits.append(accelerator.gather_for_metrics(hit))
    return torch.cat(hits).float().mean().item()


def share_global_batch(run: LoopArguments) -> None:
    """Divides the requested global batch, if any, among the present ranks."""
    if run.global_batch_size is None:
        return
    # Read the launcher's variable: before there is an Accelerator, accelerate counts one rank on the CPU.
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    batch = same_global_batch(run.global_batch_size, rows=run.per_device_train_batch_size, world_size=ranks)
    run.per_device_train_batch_size, run.gradient_accumulation_steps = batch.rows, batch.accumulation
    if batch.global_rows != run.global_batch_size and os.environ.get("RANK", "0") == "0":
        print(f"{run.global_batch_size} rows cannot be shared evenly by {ranks} ranks: a step takes {batch}.")


@finetuning.one_paragraph()
@finetuning.ranks_together()
def main():
    model_args, data_args, run = finetuning.parse_arguments(
        finetuning.ModelArguments,
        finetuning.ClassificationArguments,
        LoopArguments,
        defaults={},
        from_scratch=FROM_SCRATCH,
    )
    finetuning.check_writable(run.output_dir)
    set_seed(run.seed)
    share_global_batch(run)

    plugin = ZeroPlugin(run.zero) if run.zero is not None else None
    accelerator = Accelerator(
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        # The order of an epoch depends only on seed and epoch, so a resumed run skips exactly the samples it has seen.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        # Otherwise accelerate steps the schedule once per process, and a different number of processes would be elsewhere in it.
        step_scheduler_with_optimizer=False,
        parallelism_config=plugin,
    )
    if run.resume_from_checkpoint == "auto":
        run.resume_from_checkpoint = last_good_state(accelerator, run.output_dir)
    first_step = finetuning.step_to_resume(run.resume_from_checkpoint)

    with accelerator.local_main_process_first():
        splits = finetuning.load_classification(data_args, run.seed)
    tokenizer = finetuning.load_or_train(
        model_args,
        finetuning.train_for_classification,
        splits["train"]["text"],
        run.output_dir,
        resuming=first_step > 0,
    )
    with accelerator.local_main_process_first():
        rows = finetuning.tokenize(splits, tokenizer, data_args.max_seq_length)
    # At stage 3, the pretrained weights stay in their files until each rank reads its shard.
    with init(plugin):
        model = load_model(model_args, tokenizer, data_args.max_seq_length, finetuning.class_names(splits))

    loader = partial(DataLoader, collate_fn=DataCollatorWithPadding(tokenizer))
    train_loader, eval_loader = accelerator.prepare(
        loader(rows["train"], batch_size=run.per_device_train_batch_size, shuffle=True),
        loader(rows["validation"], batch_size=run.per_device_eval_batch_size),
    )
    steps = math.ceil(len(train_loader) / run.gradient_accumulation_steps) * run.num_train_epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, weight_decay=run.weight_decay)
    scheduler = get_scheduler(
        run.lr_scheduler_type, optimizer, num_warmup_steps=run.num_warmup_steps, num_training_steps=steps
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if first_step:
        accelerator.load_state(run.resume_from_checkpoint)

    results = {"parameters": accelerator.unwrap_model(model).num_parameters(), "processes": accelerator.num_processes}
    results |= train(accelerator, run, model, optimizer, scheduler, train_loader, first_step)
    results["eval_accuracy"] = evaluate(accelerator, model, eval_loader)
    results["peak_memory_bytes"] = finetuning.peak_memory_bytes()

    # Every rank takes part in collecting the whole weights, and the main one writes them.
    state_dict = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        run.output_dir, is_main_process=accelerator.is_main_process, state_dict=state_dict
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(run.output_dir)
        engine = engine_of(accelerator) if run.zero is not None else None
        finetuning.report("BERT classification in a plain loop", results, run.output_dir, engine)


if __name__ == "__main__":
    main()
