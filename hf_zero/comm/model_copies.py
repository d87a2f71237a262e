"""Copies of a model split over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import ConfigError
from .transport import Transport
from .waits import Label


class Agreement:
    """Sums small values over all ranks of a split model in two stages, with the same bits on all ranks.

    The first stage sums over the ranks with the same part of the model, the second over the ranks of one copy.
    """

    def __init__(self, dp_group: Transport, copy: Transport):
        self._transports = (dp_group, copy)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Returns the elementwise sum of a small tensor over the ranks, on the tensor's device."""
        for transport in self._transports:
            values = transport.agree_sum(values, label)
        return values

    def agree_largest(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the largest of the ranks' float64 scalars, on the scalar's device; NaN if one of them is NaN."""
        for transport in self._transports:
            value = transport.agree_largest(value)
        return value


@dataclass(frozen=True, kw_only=True)
class ModelCopies:
    """The copies of a model split over ranks.

    Attributes:
        copies: the ranks of each copy, in the order of their parts.
        dp_groups: for each part, the ranks with this part. ZeRO shards over these ranks.
    """

    copies: tuple[tuple[int, ...], ...]
    dp_groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, everyone: Sequence[tuple[int, ...]]) -> "ModelCopies":
        """Builds the copies from the ranks of each rank's copy.

        Args:
            everyone: for each rank, in order, the ranks that its copy of the model is split over.

        Raises:
            ConfigError: the copies differ in size, or do not contain each rank exactly once.
        """
        copies = tuple(dict.fromkeys(everyone))
        ranks = [rank for copy in copies for rank in copy]
        if sorted(ranks) != list(range(len(everyone))) or len({len(copy) for copy in copies}) > 1:
            raise ConfigError(
                f"hf_zero: the model is split over the ranks {[list(copy) for copy in copies]}; allowed: sets of equal size in "
                f"which each of the {len(everyone)} ranks is once. Load it with the same tp_size and ep_size on all ranks."
            )
        dp_groups = tuple(tuple(sorted(members)) for members in zip(*copies))
        return cls(copies=copies, dp_groups=dp_groups)

    def part_in_words(self, rank: int) -> str:
        """Names a rank's copy and part by their indices along the data and tensor parallel dimensions."""
        data, copy = next((index, copy) for index, copy in enumerate(self.copies) if rank in copy)
        return f"dp {data}, tp {copy.index(rank)}"
