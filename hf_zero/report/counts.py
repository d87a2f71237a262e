"""Steps, rows, tokens and seconds of a run, counted by the host's clock as its hooks are called."""

from dataclasses import dataclass, replace

import torch


@dataclass(kw_only=True)
class Totals:
    """Since training began here.

    Attributes:
        rows, tokens: that this rank's forwards were given.
        forward_s, backward_s, optimizer_s: seconds of steps; clipping is part of backward.
        between_s: seconds from the end of a step to the next forward.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    between_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s + self.between_s


class Counts:
    """Adds up what passes between the calls of hooks.

    Attributes:
        totals: so far.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._before = Totals()
        self._since_s = 0.0
        self._is_between = self._is_in_backward = False

    def forward(self, now_s: float, first: torch.Tensor | None) -> None:
        """A training forward begins.

        Args:
            first: its first tensor: its rows and, where it has whole numbers in two dimensions, its tokens are counted.
        """
        if self._is_between:
            self.totals.between_s += now_s - self._since_s
        elif self._is_in_backward:
            self.totals.backward_s += now_s - self._since_s
        self._since_s, self._is_between, self._is_in_backward = now_s, False, False
        if first is not None and first.dim():
            self.totals.rows += first.shape[0]
            if first.dim() == 2 and not first.is_floating_point():
                self.totals.tokens += first.numel()

    def forward_ended(self, now_s: float) -> None:
        self.totals.forward_s += now_s - self._since_s
        self._since_s, self._is_in_backward = now_s, True

    def step(self, now_s: float) -> None:
        """The optimizer's step begins."""
        if self._is_in_backward:
            self.totals.backward_s += now_s - self._since_s
        self._since_s, self._is_in_backward = now_s, False

    def step_ended(self, now_s: float) -> None:
        self.totals.optimizer_s += now_s - self._since_s
        self.totals.steps += 1
        self._since_s, self._is_between = now_s, True

    def taken(self) -> dict[str, int | float]:
        """What has been added since this was last asked, as fields of a line."""
        before, self._before = self._before, replace(self.totals)
        return {name: _rounded(value - getattr(before, name)) for name, value in vars(self._before).items()}


def _rounded(value: float) -> int | float:
    return round(value, 6) if isinstance(value, float) else value
