"""A transport on which a rank whose forward or backward has failed goes through it once more, for the other ranks' sake.

[Note: catching up]
At stage 3 the others wait in gathers of the layers behind the one in which a rank has failed. Which collectives a pass has, and
in which order, depends on the model and not on the batch. So the rank takes the same pass again with a batch that it has
memory for. What it had started before the failure is not started a second time, and leaves zeros; from then on it takes part.
What is computed so is of no use: all ranks throw the pass away when it has ended.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ...comm.groups.groups import RankGroup
from ...comm.transport import Handle, Label, Transport, Value

Result = TypeVar("Result")


class _Nothing(Handle):
    """A collective that is not started."""

    def __init__(self) -> None:
        self._complete = None


class RepeatableTransport(Transport):
    """Another transport's collectives, counted, so that those of a pass can be left out when it is taken again.

    Attributes:
        is_torn: a collective has failed while it was being started, so that nobody knows what of it the others have got.
    """

    def __init__(self, inner: Transport):
        super().__init__(inner.ledger)
        self.adds_in_wider = inner.adds_in_wider
        self._inner = inner
        self._started = self._left_out = 0
        self._is_silent = False
        # What small collectives of this pass have come to, and those of them that a repetition has still to be told.
        self._answers: list[Any] = []
        self._told: list[Any] = []
        self.is_torn = False

    @property
    def name(self) -> str:
        return self._inner.name

    def begin_pass(self) -> None:
        """From here on collectives are counted."""
        self._started, self.is_torn = 0, False
        self._answers.clear()

    @contextmanager
    def catching_up(self) -> Iterator[None]:
        """Those of the pass that were started already are left out; see [Note: catching up]."""
        self._left_out, self._told = self._started, list(self._answers)
        try:
            yield
        finally:
            self._left_out = 0

    @contextmanager
    def silent(self) -> Iterator[None]:
        """None is started, and none counted."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        if self._leaves_out():
            return _zeros(out)
        return self._start(lambda: self._inner.start_reduce_scatter(flat, out, label, among))

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        if self._leaves_out():
            return _zeros(flat, but=own)
        return self._start(lambda: self._inner.start_all_gather(flat, own, label, among))

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        if self._leaves_out():
            return _zeros(out)
        return self._start(lambda: self._inner.start_all_to_all(flat, out, label, among))

    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        if self._leaves_out():
            return _zeros(flat)
        return self._start(lambda: self._inner.start_all_reduce(flat, label))

    def broadcast(self, tensor: torch.Tensor, label: Label) -> None:
        if not self._leaves_out():
            self._start(lambda: self._inner.broadcast(tensor, label))

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        return self._answer(lambda: self._inner.agree_sum(values, label))

    def agree_max(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        return self._answer(lambda: self._inner.agree_max(values, label))

    def meet(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        self._answer(lambda: self._inner.meet(purpose, timeout_s, alone))

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return self._answer(lambda: self._inner.exchange(value, purpose))

    def _leaves_out(self) -> bool:
        if self._left_out and not self._is_silent:
            self._left_out -= 1
            return True
        return self._is_silent

    def _start(self, start: Callable[[], Result]) -> Result:
        try:
            result = start()
        except BaseException:
            self.is_torn = True
            raise
        self._started += 1
        return result

    def _answer(self, ask: Callable[[], Result]) -> Result:
        if self._leaves_out():
            return self._told.pop(0)
        answer = self._start(ask)
        self._answers.append(answer)
        return answer


def _zeros(flat: torch.Tensor, but: torch.Tensor | None = None) -> Handle:
    """Leaves zeros where a collective would have put something, and what is `but` a part of it as it was."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(flat):
        begin = end = 0
        if but is not None and but.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
            begin = int(but.storage_offset() - flat.storage_offset())
            end = begin + but.numel()
        flat[:begin].zero_()
        flat[end:].zero_()
    return _Nothing()
