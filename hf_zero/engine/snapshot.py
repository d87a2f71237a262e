"""A copy of this rank's state in host memory, to go back to."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..buckets.rows import StateRow
from ..layout.intervals import Interval
from .engine_state import EngineState
from .units.weights import OwnWeights

_OF_SCHEDULERS = ("params", "lr", "momentum", "betas")
"""What stays as it is in a group: schedulers, which are not rewound, write the others."""


class Snapshot:
    """Parameters, masters, optimizer state, residuals of error feedback and the model's buffers; see `nonfinite: rewind`.

    Args:
        state: of the engine.
    """

    def __init__(self, model: nn.Module, state: EngineState):
        self._model = model
        self._state = state
        self._weights: dict[nn.Parameter, list[OwnWeights]] = {}
        self._rows: dict[tuple[str, str], StateRow] = {}
        self._scalars: dict[str, dict[str, Any]] = {}
        self._settings: list[dict[str, Any]] = []
        self._buffers: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Replaces the snapshot by the state as it is now."""
        self._weights = {}
        for own in self._state.held_weights():
            kept = OwnWeights(parameter=own.parameter, interval=own.interval, values=_copy(own.values))
            self._weights.setdefault(own.parameter, []).append(kept)
        self._rows = {(row.kind, row.name): _kept(row) for row in self._state.rows()}
        self._rows |= {(row.kind, row.name): _kept(row) for row in self._state.residual_rows()}
        self._scalars = copy.deepcopy(self._state.scalars())
        self._settings = [copy.deepcopy(settings) for settings in map(_settings_of, self._groups())]
        self._buffers = [_copy(buffer) for buffer in self._model.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Makes the state what it was when the snapshot was taken. Collective."""
        self._state.load_weights(self._read_weights)
        self._state.fill(self._read, self._kinds_of, self._scalars_of)
        self._state.share_weights()
        for group, settings in zip(self._groups(), self._settings, strict=True):
            group.update(copy.deepcopy(settings))
        for buffer, values in zip(self._model.buffers(), self._buffers, strict=True):
            buffer.copy_(values)

    def _groups(self) -> Sequence[dict[str, Any]]:
        return [group for optimizer, _ in self._state.groups() for group in optimizer.param_groups]

    def _read_weights(self, parameter: nn.Parameter, interval: Interval) -> torch.Tensor:
        own = next(each for each in self._weights[parameter] if each.interval == interval)
        return own.values

    def _read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        row = self._rows[kind, name]
        here = interval.shift(-row.interval.start)
        assert isinstance(row.tensor, torch.Tensor)
        # What is given becomes the optimizer's own state.
        return row.tensor[here.start : here.stop].clone()

    def _kinds_of(self, name: str) -> list[str]:
        return [kind for (kind, of), row in self._rows.items() if of == name and row.own_shape is None]

    def _scalars_of(self, name: str) -> dict[str, Any]:
        own_shaped = {
            kind: self._read(kind, name, row.interval).view(row.own_shape)
            for (kind, of), row in self._rows.items()
            if of == name and row.own_shape is not None
        }
        return copy.deepcopy(self._scalars.get(name, {})) | own_shaped


def _copy(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True)


def _kept(row: StateRow) -> StateRow:
    # What is packed becomes a tensor by its `detach`.
    return StateRow(
        kind=row.kind,
        name=row.name,
        interval=row.interval,
        own_shape=row.own_shape,
        tensor=row.tensor.detach().to("cpu", copy=True),
    )


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _OF_SCHEDULERS}
