"""Checks that all ranks train with the same arguments, data and schedule."""

from functools import partial
from typing import Any

from accelerate import Accelerator

from ..comm.all_or_none import exchange_between_ranks
from ..engine.agreed_start import refuse_disagreement
from ..engine.engine import ZeroEngine

# The engine itself compares the settings visible to it (parameter groups, dropout, clipping); see `SharedSettings`. The
# arguments below are not visible to the engine, or only once they make a step differ.

_SHARED_ARGUMENTS = """
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim optim_args optim_target_modules
    lr_scheduler_type lr_scheduler_kwargs warmup_steps num_train_epochs max_steps per_device_train_batch_size
    gradient_accumulation_steps average_tokens_across_devices seed data_seed full_determinism train_sampling_strategy
    length_column_name dataloader_drop_last ignore_data_skip label_smoothing_factor neftune_noise_alpha fp16 bf16
    activation_checkpointing gradient_checkpointing save_strategy save_steps eval_strategy eval_steps eval_delay
    load_best_model_at_end metric_for_best_model greater_is_better
"""
"""TrainingArguments that must be equal on all ranks. Paths, logging, data loader workers and Hub settings may differ."""


def refuse_other_arguments(trainer: Any) -> None:
    """Raises `ValueError` on all ranks of a Trainer whose arguments or number of training samples differ. Collective."""
    args = trainer.args
    names = [name for name in _SHARED_ARGUMENTS.split() if hasattr(args, name)]
    facts = {f"TrainingArguments.{name}": str(getattr(args, name)) for name in names}
    facts["samples of train_dataset"] = _length_of(trainer.train_dataset)
    refuse_disagreement(facts, exchange_between_ranks)


def refuse_other_loops(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Raises `ValueError` on all ranks if their data loaders, schedulers or accumulation steps differ. Collective."""
    facts = {"gradient_accumulation_steps": str(accelerator.gradient_accumulation_steps)}
    for number, loader in enumerate(accelerator._dataloaders):
        facts[f"samples of data loader {number}"] = _length_of(getattr(loader, "dataset", None))
        facts[f"batch size of data loader {number}"] = str(
            getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        )
    for number, accelerated in enumerate(accelerator._schedulers):
        facts[f"scheduler {number}"] = _schedule_of(accelerated.scheduler)
    try:
        refuse_disagreement(facts, partial(engine.world.exchange, purpose="accelerator.prepare"))
    except ValueError:
        # Closed, so the script can prepare the model again.
        engine.close()
        raise


def _length_of(dataset: Any) -> str:
    try:
        return str(len(dataset))
    except (TypeError, NotImplementedError):
        # The length of streamed data is unknown; datasets raise one of these errors.
        return "unknown"


def _schedule_of(scheduler: Any) -> str:
    """Returns a scheduler's class and numeric attributes, including the arguments of transformers' partial functions."""
    found = {name: value for name, value in vars(scheduler).items() if isinstance(value, int | float | str)}
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, partial):
            found |= {name: value for name, value in function.keywords.items() if isinstance(value, int | float | str)}
    return f"{type(scheduler).__name__} {found}"
