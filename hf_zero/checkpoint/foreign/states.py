"""What a foreign checkpoint offers, whichever engine wrote it: the same questions that a checkpoint of ours answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...layout.boxes import Box
from ...layout.intervals import Interval
from ..format.manifest import CheckpointError

MASTER = "master"
"""The kind of the trained values themselves, in the precision that the optimizer kept them in."""


@dataclass(frozen=True, kw_only=True)
class ForeignGroup:
    """One group of the saved optimizer: its settings (learning rate, betas, …) and its parameters' names."""

    settings: dict[str, Any]
    names: tuple[str, ...]


class ForeignCheckpoint(ABC):
    """Masters and optimizer state by parameter and interval.

    Attributes:
        folder: that was given, for messages.
        origin: who wrote it, in words ("DeepSpeed 0.19.8, ZeRO stage 2, 4 ranks").
        shapes: trained parameter → whole shape.
        groups: of the saved optimizer, in its order; groups without a parameter are left out.
    """

    folder: Path
    origin: str
    shapes: dict[str, tuple[int, ...]]
    groups: tuple[ForeignGroup, ...]
    _others: dict[str, torch.Tensor] | None = None

    @abstractmethod
    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Kinds that have one value an element of this parameter, `MASTER` among them."""

    @abstractmethod
    def scalars_of(self, name: str) -> dict[str, Any]:
        """State that is one value for the whole parameter (`step`)."""

    @abstractmethod
    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        """The elements `interval` of one kind of one parameter, a 1-D host tensor of its own memory.

        Raises:
            CheckpointError: the bytes are not there or cannot be read.
        """

    def read_part(self, kind: str, name: str, box: Box, interval: Interval) -> torch.Tensor:
        """The same of a part of the parameter; `interval` is of the part."""
        if box.is_whole:
            return self.read(kind, name, interval)
        runs = box.runs(interval)
        return torch.cat([self.read(kind, name, Interval(start, start + run.numel)) for run, start in runs])

    @abstractmethod
    def other_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Frozen parameters and buffers, whole, by their names in the model."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of the model, whole; trained ones as the optimizer kept them. One at a time."""
        for name, shape in self.shapes.items():
            yield name, self.read(MASTER, name, Interval(0, torch.Size(shape).numel())).view(shape)
        yield from self.other_weights()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every weight of the model, by its name there."""
        return self.shapes | {name: tuple(value.shape) for name, value in self.other_weights()}

    def weight_dtype(self, name: str) -> torch.dtype:
        """In which `read_weight` gives a weight."""
        return self.read_weight(name, Box.whole(self.weight_shapes()[name]), Interval(0, 1)).dtype

    def read_weight(self, name: str, box: Box, interval: Interval) -> torch.Tensor:
        """The elements `interval` of a part of a weight; trained ones as the optimizer kept them. 1-D."""
        if name in self.shapes:
            return self.read_part(MASTER, name, box, interval)
        if self._others is None:
            self._others = dict(self.other_weights())
        flat = self._others[name].reshape(-1)
        runs = [flat[start : start + run.numel] for run, start in box.runs(interval)]
        return torch.cat(runs) if runs else flat[:0]

    def check_names(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises `CheckpointError` unless the checkpoint trains exactly these parameters, with these shapes."""
        for name in shapes:
            if name not in self.shapes:
                raise self._other(f"{name!r} is trained now and is not among its trained parameters")
        for name, saved in self.shapes.items():
            if name not in shapes:
                raise self._other(f"{name!r} is trained there and not now")
            if saved != tuple(shapes[name]):
                raise self._other(f"{name!r} has shape {saved} there and {tuple(shapes[name])} in the model")

    def _other(self, fault: str) -> CheckpointError:
        return CheckpointError(
            f"hf_zero: {self.folder} ({self.origin}): {fault}. Resume with the model and the frozen parameters that the "
            "checkpoint was made with."
        )
