"""The rows that all ranks together take in an optimizer step, kept when their number changes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How the rows of an optimizer step are dealt out.

    Attributes:
        rows: of a micro-batch on a rank.
        accumulation: micro-batches of a step.
        world_size: ranks that take different rows.
    """

    rows: int
    accumulation: int
    world_size: int

    @property
    def rows_of_a_round(self) -> int:
        """Rows of one micro-batch on each rank."""
        return self.rows * self.world_size

    @property
    def global_rows(self) -> int:
        return self.rows_of_a_round * self.accumulation

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.accumulation} micro-batches x {self.world_size} ranks = {self.global_rows}"


def same_global_batch(global_rows: int, *, rows: int, world_size: int) -> Batch:
    """The dealing of `global_rows` to ranks that take at most `rows` in a micro-batch.

    It has exactly `global_rows` wherever their number can be divided by `world_size`, with the largest micro-batch that does;
    elsewhere it has fewer than `world_size * accumulation` rows less.

    Raises:
        ValueError: there are more ranks than rows.
    """
    a_rank = global_rows // world_size
    if a_rank == 0:
        raise ValueError(
            f"hf_zero: a step of {global_rows} rows cannot be dealt to {world_size} ranks. Start at most {global_rows} ranks, or "
            "train with a larger batch from the beginning."
        )
    if global_rows % world_size == 0:
        micro = next(each for each in range(min(rows, a_rank), 0, -1) if a_rank % each == 0)
        return Batch(rows=micro, accumulation=a_rank // micro, world_size=world_size)
    accumulation = -(-a_rank // rows)
    return Batch(rows=a_rank // accumulation, accumulation=accumulation, world_size=world_size)
