"""Which ranks hold one copy of a model that is split over them, and what they agree on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import ConfigError
from .transport import Label, Transport, Value


@dataclass(frozen=True, kw_only=True)
class ModelCopies:
    """The ranks of a run, where each copy of the model is split over several.

    Attributes:
        copies: the ranks of each copy, in the order of their parts.
        alike: the ranks that hold the same part, for each part: they are what ZeRO shards over.
    """

    copies: tuple[tuple[int, ...], ...]
    alike: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, everyone: Sequence[tuple[int, ...]]) -> "ModelCopies":
        """
        Args:
            everyone: of each rank, in order, the ranks that its copy of the model is split over.

        Raises:
            ConfigError: these are not copies of equal size that have each rank once.
        """
        copies = tuple(dict.fromkeys(everyone))
        ranks = [rank for copy in copies for rank in copy]
        if sorted(ranks) != list(range(len(everyone))) or len({len(copy) for copy in copies}) > 1:
            raise ConfigError(
                f"hf_zero: the model is split over the ranks {[list(copy) for copy in copies]}; each of the {len(everyone)} "
                "ranks of this run has to be in one of these sets, and all sets have to be of one size. Load the model on all "
                "ranks with the same tp_size and ep_size."
            )
        alike = tuple(tuple(sorted(members)) for members in zip(*copies))
        return cls(copies=copies, alike=alike)

    def part_in_words(self, rank: int) -> str:
        """Which copy a rank is of and which part it has: its places along the data and the tensor parallel axis."""
        data, copy = next((place, copy) for place, copy in enumerate(self.copies) if rank in copy)
        return f"dp {data}, tp {copy.index(rank)}"


class OverCopies:
    """Agrees first among the ranks that hold the same part of the model, then among those of one copy.

    All ranks come to the same bits.

    Args:
        alike: between ranks that hold the same part.
        copy: between the ranks of one copy.
        replicated: ranks that hold the same part have found the same already.
    """

    def __init__(self, alike: Transport, copy: Transport, *, replicated: bool):
        self._alike = alike
        self._copy = copy
        self._replicated = replicated

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Elementwise sum over all ranks of a small tensor, on its own device."""
        summed = values if self._replicated else self._alike.agree_sum(values, label)
        return self._copy.agree_sum(summed, label)

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        """Every rank's picklable `value`: by part, and of a part in rank order."""
        of_part = [value] if self._replicated else self._alike.exchange(value, purpose)
        return [each for part in self._copy.exchange(of_part, purpose) for each in part]


Agreement = Transport | OverCopies
"""What ranks agree by that have each found a part of something."""
