"""Takes a rank on which a forward or backward has failed through the rest of its collectives; see [Note: catching up]."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .build.assemble import Parts
from .gradients.backward_pass import Gradients
from .travel.buffers import ModelBuffers
from .travel.repeatable import RepeatableTransport
from .units.schedule import ScheduleState, Unsharding


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What a pass began with, as far as its collectives depend on it."""

    schedule: ScheduleState
    passes_over: bool
    buffers_due: bool


class CatchUp:
    """Marks where a pass begins, and brings everything that its collectives depend on back to there.

    Memory of parameters that were gathered, and gradients, are not brought back: what is computed is thrown away.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: RepeatableTransport,
        schedule: Unsharding,
        gradients: Gradients,
        buffers: ModelBuffers,
    ):
        self._model, self._transport = model, transport
        self._schedule, self._gradients, self._buffers = schedule, gradients, buffers
        self._before = self._state()

    def begin_pass(self) -> None:
        """A forward and backward begin, which may fail on any rank."""
        self._transport.begin_pass()
        self._before = self._state()

    @property
    def is_possible(self) -> bool:
        """False where the failure was inside of a collective's start, and the others wait for the rest of that one."""
        return not self._transport.is_torn

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the same pass, taken with a batch that there is memory for."""
        self._gradients.begin_again(passes_over=self._before.passes_over)
        with self._transport.silent():
            self._schedule.go_back(self._before.schedule)
        self._buffers.is_due = self._before.buffers_due
        # Statistics of activations that are of no use.
        kept = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        try:
            with self._transport.catching_up():
                yield
        finally:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(b for b, _ in kept)):
                for buffer, values in kept:
                    buffer.copy_(values)

    def _state(self) -> _Before:
        return _Before(
            schedule=self._schedule.state(),
            passes_over=self._gradients.may_pass_over,
            buffers_due=self._buffers.is_due,
        )


def choose_catch_up(model: nn.Module, parts: Parts, gradients: Gradients) -> CatchUp | None:
    """For stage 3 on several ranks with `out_of_memory: halve`; None elsewhere."""
    transport = parts.meeting.step_transport
    if not isinstance(transport, RepeatableTransport):
        return None
    return CatchUp(model, transport, parts.sharded.schedule, gradients, parts.model_buffers)
