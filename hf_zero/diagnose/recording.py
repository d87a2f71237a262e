"""Files of a recorded run: losses by rank, gradients and parameters by step."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor | None]
"""Parameter name → a whole tensor in host memory; None where there is no gradient."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is to be known of a run to say whether another can have the same bits.

    Attributes:
        config: the engine's settings; None for a run without it.
        dtypes: of the trained parameters.
        device: its type.
        optimizer: its class.
        order: names of the trained parameters, in the model's order.
    """

    world_size: int
    config: dict[str, Any] | None
    dtypes: list[str]
    device: str
    optimizer: str
    order: list[str]


class Recording:
    """Reads what a `Recorder` has written."""

    def __init__(self, folder: Path):
        self._folder = folder
        traces = sorted(folder.glob("trace-*.pt"), key=lambda path: int(path.stem.removeprefix("trace-")))
        self._traces = [torch.load(path, weights_only=True) for path in traces]

    @property
    def facts(self) -> Facts | None:
        """None where no optimizer step came."""
        path = self._folder / "facts.json"
        return Facts(**json.loads(path.read_text())) if path.is_file() else None

    @property
    def losses(self) -> list[list[list[float]]]:
        """By rank, step and micro-batch."""
        return [trace["losses"] for trace in self._traces]

    @property
    def norms(self) -> list[float | None]:
        """What clipping returned in each step; None where nothing was clipped."""
        return self._traces[0]["norms"] if self._traces else []

    @property
    def steps(self) -> int:
        """Optimizer steps that were recorded to their end."""
        return len(self.norms)

    def start(self) -> Tensors:
        """Parameters before the first step."""
        return self._load("start")

    def gradients(self, step: int) -> Tensors:
        """What the optimizer was given in a step."""
        return self._load(f"gradients-{step}")

    def parameters(self, step: int) -> Tensors:
        """What the optimizer left behind after a step."""
        return self._load(f"parameters-{step}")

    def _load(self, name: str) -> Tensors:
        return torch.load(self._folder / f"{name}.pt", weights_only=True, mmap=True)


def write_tensors(folder: Path, name: str, tensors: Tensors) -> None:
    torch.save(dict(tensors), folder / f"{name}.pt")


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / "facts.json").write_text(json.dumps(dataclasses.asdict(facts)))


def write_trace(folder: Path, rank: int, trace: Mapping[str, list]) -> None:
    torch.save(dict(trace), folder / f"trace-{rank}.pt")
