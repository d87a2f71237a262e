"""Whether work done ahead has paid lately."""

from collections import deque

_STEPS = 20
_MOST_IN_VAIN = 1


class Trust:
    """Holds while at most one of the last 20 steps would have been, or was, begun in vain. One step is watched first.

    Steps are recorded whether or not anything was begun, so that trust comes back when a run stops clipping.
    """

    def __init__(self):
        self._in_vain: deque[bool] = deque(maxlen=_STEPS)

    @property
    def holds(self) -> bool:
        return bool(self._in_vain) and sum(self._in_vain) <= _MOST_IN_VAIN

    def record(self, *, in_vain: bool) -> None:
        self._in_vain.append(in_vain)
