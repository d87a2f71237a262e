"""Which ranks hold one copy of a model that is split over them, and what they agree on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import ConfigError
from .transport import Label, Transport


class Agreement:
    """Ranks that have each found a part of something agree on the whole, all on the same bits.

    First those agree that hold the same part of the model, then those of one copy of it.

    Args:
        alike: between ranks that hold the same part.
        copy: between the ranks of one copy; None where each holds all.
        replicated: ranks that hold the same part have found the same already.
    """

    def __init__(self, alike: Transport, copy: Transport | None = None, *, replicated: bool = False):
        self._transports = [each for each in (None if replicated else alike, copy) if each is not None]

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Elementwise sum over the ranks of a small tensor, on its own device."""
        for transport in self._transports:
            values = transport.agree_sum(values, label)
        return values

    def agree_largest(self, value: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' float64 scalars, on its own device; NaN where one is."""
        for transport in self._transports:
            # Python's own `max` passes over a NaN that is not the first.
            value = value.new_tensor(transport.exchange(value.item())).max()
        return value


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
