"""How many rows a step takes on all ranks together, which changes with the number of ranks."""

import sys

from accelerate import Accelerator

from ..frames import find_in_callers


def rows_of_a_step(accelerator: Accelerator) -> str | None:
    """Rows of an optimizer step over ranks and micro-batches, in words; None where no prepared data loader tells."""
    loader = next(iter(accelerator._dataloaders), None)
    sampler = getattr(loader, "batch_sampler", None)
    rows = getattr(sampler, "batch_size", None)
    if not isinstance(rows, int):
        return None
    # The ranks of one copy of a model have the same rows.
    copies = accelerator.num_processes // getattr(accelerator.parallelism_config, "tp_size", 1)
    ranks, micro_batches = copies, micro_batches_of(accelerator)
    if getattr(sampler, "split_batches", False):
        rows //= ranks
    factors = [f"{rows} a rank"]
    factors += [f"{micro_batches} micro-batches"] if micro_batches > 1 else []
    if ranks == 1:
        return f"{' x '.join(factors)} on one rank; N ranks take N times as many"
    return f"{' x '.join([*factors, f'{ranks} ranks'])} = {rows * micro_batches * ranks}"


def micro_batches_of(accelerator: Accelerator) -> int:
    """Micro-batches of an optimizer step, by accelerate's word or Trainer's."""
    if "transformers.trainer" in sys.modules:
        from transformers import Trainer

        trainer = find_in_callers(lambda candidate: isinstance(candidate, Trainer))
        if trainer is not None:
            # Trainer tells accelerate nothing of accumulation, and counts micro-batches by itself.
            return trainer.args.gradient_accumulation_steps
    return accelerator.gradient_accumulation_steps
