"""The number of samples per optimizer step on all ranks together, kept when the number of ranks changes."""

from dataclasses import dataclass

from accelerate import Accelerator

from .callers import trainer_in_callers


def rows_of_a_step(accelerator: Accelerator) -> str | None:
    """Returns the samples per optimizer step over ranks and micro-batches, in words; None without a prepared data loader."""
    loader = next(iter(accelerator._dataloaders), None)
    sampler = getattr(loader, "batch_sampler", None)
    rows = getattr(sampler, "batch_size", None)
    if not isinstance(rows, int):
        return None
    # Ranks with tensor or sequence parallelism share the same samples.
    copies = accelerator.num_processes // ranks_of_a_batch(accelerator)
    ranks, micro_batches = copies, micro_batches_of(accelerator)
    if getattr(sampler, "split_batches", False):
        # With split batches, accelerate deals one batch of the loader to all ranks.
        rows //= ranks
    factors = [f"{rows} a rank"]
    factors += [f"{micro_batches} micro-batches"] if micro_batches > 1 else []
    if ranks == 1:
        return f"{' x '.join(factors)} on one rank; N ranks take N times as many"
    return f"{' x '.join([*factors, f'{ranks} ranks'])} = {rows * micro_batches * ranks}"


def ranks_of_a_batch(accelerator: Accelerator) -> int:
    """Returns how many ranks compute a batch together."""
    said = accelerator.parallelism_config
    return 1 if said is None else said.tp_size * said.sp_size


def micro_batches_of(accelerator: Accelerator) -> int:
    """Returns the micro-batches of an optimizer step, according to accelerate or Trainer."""
    trainer = trainer_in_callers()
    # Trainer counts micro-batches itself and does not set accumulation in accelerate.
    return (accelerator if trainer is None else trainer.args).gradient_accumulation_steps


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The division of an optimizer step's samples.

    Attributes:
        rows: samples of a micro-batch on a rank.
        accumulation: micro-batches per step.
        world_size: number of ranks with different samples.
    """

    rows: int
    accumulation: int
    world_size: int

    @property
    def rows_of_a_round(self) -> int:
        """Samples of one micro-batch on all ranks."""
        return self.rows * self.world_size

    @property
    def global_rows(self) -> int:
        return self.rows_of_a_round * self.accumulation

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.accumulation} micro-batches x {self.world_size} ranks = {self.global_rows}"


def same_global_batch(global_rows: int, *, rows: int, world_size: int) -> Batch:
    """Divides the `global_rows` samples of a step among the ranks, with at most `rows` samples in a micro-batch.

    If `world_size` divides `global_rows`, a step has exactly `global_rows` samples, in the largest micro-batches that allow
    this. Otherwise a step has fewer samples, by less than `world_size * accumulation`.

    Raises:
        ValueError: there are more ranks than samples, or a number is below 1.
    """
    if min(global_rows, rows, world_size) < 1:
        raise ValueError(
            f"hf_zero: same_global_batch got {global_rows} rows in a step, {rows} in a micro-batch and {world_size} ranks. "
            "Each must be at least 1."
        )
    a_rank = global_rows // world_size
    if a_rank == 0:
        raise ValueError(
            f"hf_zero: a step of {global_rows} rows cannot be distributed over {world_size} ranks. Start at most {global_rows} "
            "ranks, or train with a larger batch from the start."
        )
    if global_rows % world_size == 0:
        micro = next(each for each in range(min(rows, a_rank), 0, -1) if a_rank % each == 0)
        return Batch(rows=micro, accumulation=a_rank // micro, world_size=world_size)
    accumulation = -(-a_rank // rows)
    return Batch(rows=a_rank // accumulation, accumulation=accumulation, world_size=world_size)
