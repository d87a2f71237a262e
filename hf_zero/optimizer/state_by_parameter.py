"""`optimizer.state` for scripts that look up the state of a whole Parameter, although each rank steps only a shard."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..buckets.bucket import ParameterSlot, Row
from ..comm.waits import Label
from .full_state import full_state
from .storage import OptimizerStorage

State = dict[str, Any]


@dataclass(frozen=True)
class _Whole:
    """The whole state of a parameter as given to a script, and marks to detect later edits of this state or of the row's."""

    state: State
    marks: list[tuple[str, int, int]]
    row_marks: list[tuple[str, int, int]]


class StateByParameter(defaultdict[Any, State]):
    """Maps row tensors to their state for the optimizer's step, and the model's Parameters to whole state.

    Scripts look up state by the model's Parameters, for example to reset the moments of some neurons. `state[parameter]`
    gathers the whole state, and the next forward, step or save cuts the script's edits to the ranks' rows. `parameter in
    state` and `state[parameter]` are collective; `del` and assignment must be executed on all ranks, as under DDP. `items()`
    yields only row tensors; elementwise edits of their state are correct, too.

    Args:
        state: row tensor → its state.
        slots: parameter → slot, for all parameters stepped as rows.
        storage: stores the rows' state.
        cut: (state value of a whole parameter, row) → this rank's part.
        timeout_s: time limit for the other ranks.

    Attributes:
        looked_up: the whole state given to the script or set by the script since `follow_edits`, by parameter.
    """

    def __init__(
        self,
        state: Mapping[Any, State],
        slots: Mapping[Any, ParameterSlot],
        storage: OptimizerStorage,
        cut: Callable[[State, Row], State],
        timeout_s: float,
    ):
        # A subclass of defaultdict with `__missing__`, so look-ups of row tensors in a step stay in C.
        super().__init__(dict, state)
        self._slots = slots
        self._storage = storage
        self._cut = cut
        self._timeout_s = timeout_s
        self.looked_up: dict[nn.Parameter, _Whole] = {}

    def __missing__(self, key: Any) -> State:
        slot = self._slot_of(key)
        if slot is None:
            return super().__missing__(key)
        if key not in self.looked_up:
            mine = self._row_state(slot)
            whole = full_state(slot, mine, self._storage, self._timeout_s, "optimizer.state[parameter]")
            self._keep(key, whole, _marks(mine))
        return self.looked_up[key].state

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        slot = self._slot_of(key)
        if slot is None:
            return False
        # Agreed over ranks, because a rank without a row does not know, and all ranks must choose the same branch of the
        # script.
        transport = slot.bucket.group.transport
        transport.barrier("`parameter in optimizer.state`", self._timeout_s)
        has_any = slot.parameter in self.looked_up or bool(self._row_state(slot))
        mine = torch.tensor([has_any], dtype=torch.uint8)
        return bool(transport.agree_max(mine, Label(kind="agreement on optimizer state", subject=slot.name)).item())

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def __setitem__(self, key: Any, value: State) -> None:
        if self._slot_of(key) is not None:
            self._keep(key, value, [])
        else:
            super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        slot = self._slot_of(key)
        if slot is None:
            super().__delitem__(key)
            return
        self.looked_up.pop(key, None)
        if slot.row is not None:
            super().pop(slot.row.tensor, None)

    def pop(self, key: Any, *default: Any) -> Any:
        if self._slot_of(key) is None:
            return super().pop(key, *default)
        if default and key not in self:
            return default[0]
        whole = self[key]
        del self[key]
        return whole

    def clear(self) -> None:
        self.looked_up.clear()
        super().clear()

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are plain defaultdicts without an engine.
        return defaultdict, (dict,), None, None, iter(self.items())

    def follow_edits(self) -> None:
        """Cuts a script's edits of whole state to this rank's rows, and drops the whole state.

        Raises:
            RuntimeError: the script has also edited the row's state.
        """
        whole, self.looked_up = self.looked_up, {}
        for parameter, found in whole.items():
            row = self._slots[parameter].row
            if row is None:
                continue
            is_edited = _marks(found.state) != found.marks
            row_is_edited = bool(found.row_marks) and _marks(self._row_state(row.slot)) != found.row_marks
            if is_edited and row_is_edited:
                raise RuntimeError(
                    f"hf_zero: the state of {row.slot.name!r} was edited both as optimizer.state[parameter] and as a value of "
                    "optimizer.state. Use one of the two between steps."
                )
            # An edit through `.data` leaves no mark, so use the whole state unless the row's state was edited.
            if not row_is_edited and (found.state or found.row_marks):
                self[row.tensor] = self._storage.put(row, self._cut(found.state, row))

    def _slot_of(self, key: object) -> ParameterSlot | None:
        # An optimizer's state may have keys of further kinds, some of which are not hashable.
        return self._slots.get(key) if isinstance(key, torch.Tensor) else None

    def _row_state(self, slot: ParameterSlot) -> State:
        return {} if slot.row is None else super().get(slot.row.tensor, {})

    def _keep(self, parameter: nn.Parameter, state: State, row_marks: list[tuple[str, int, int]]) -> None:
        self.looked_up[parameter] = _Whole(state, _marks(state), row_marks)


def _marks(state: State) -> list[tuple[str, int, int]]:
    """Returns (name, identity, version) of each value."""
    return [(name, id(value), value._version if torch.is_tensor(value) else 0) for name, value in state.items()]
