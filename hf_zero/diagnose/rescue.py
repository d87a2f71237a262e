"""Micro-batches that run out of memory, taken again in parts."""

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.engine import ZeroEngine
from .parts_of_batch import cut, rows_of

_log = logging.getLogger(__name__)

Pass = Callable[[Any, float], torch.Tensor]
"""Forward and backward of some rows and the weight of their mean loss in the micro-batch's; returns the loss, weighted."""

_STATEMENTS = ("out of memory", "can't allocate memory")


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    batch: Any
    run: Pass


class Rescue:
    """Takes the micro-batches of an engine's steps; where one runs out of memory, the step's are taken again in more parts.

    All ranks cut alike, since a backward is collective. From then on each micro-batch is taken in as many parts.

    At stages 0 to 2: at stage 3 the other ranks wait in gathers for the rank that has failed.

    Attributes:
        parts: into which a micro-batch is cut.
    """

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._taken: list[_MicroBatch] = []
        self.parts = 1

    def serves(self, engine: ZeroEngine) -> bool:
        """Whether it is of this engine, and not of an earlier one."""
        return self._engine is engine

    def run(self, batch: Any, run: Pass, *, ends_step: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch, in parts if need be; returns its loss. Collective.

        Args:
            ends_step: the optimizer's step follows.

        Raises:
            torch.OutOfMemoryError: on all ranks: single rows, or a batch that cannot be cut.
        """
        self._taken.append(_MicroBatch(batch=batch, run=run))
        todo = self._taken[-1:]
        while True:
            loss, failure = self._attempt(todo)
            if failure is None and loss is not None:
                break
            self._cut_more(failure or "on another rank")
            # The gradients of those before it are dropped, too.
            todo = self._taken
        if ends_step:
            self._taken = []
        return loss

    def _attempt(self, todo: list[_MicroBatch]) -> tuple[torch.Tensor | None, str | None]:
        """The last one's loss, or why there is none."""
        ended = self._engine.ended_backwards
        loss: torch.Tensor | None = None
        for each in todo:
            loss = None
            pieces = cut(each.batch, self.parts) if self.parts > 1 else [(each.batch, 1.0)]
            for place, (inputs, weight) in enumerate(pieces):
                is_last = each is todo[-1] and place == len(pieces) - 1
                ended = self._engine.ended_backwards
                with nullcontext() if is_last else self._engine.no_sync():
                    part, failure = _tried(each.run, inputs, weight)
                    if self._engine.drop_failed(ended, failed=part is None):
                        _free_memory()
                        return None, failure or "on another rank"
                assert part is not None
                loss = part if loss is None else loss + part
        return loss, None

    def _cut_more(self, reason: str) -> None:
        """Doubles the parts, if any micro-batch of the step has as many rows on some rank."""
        rows = [rows_of(each.batch) for each in self._taken]
        mine = 0 if None in rows else max(row for row in rows if row is not None)
        everyone = self._engine.world.exchange(mine)
        if 0 in everyone or max(everyone) <= self.parts:
            self._taken = []
            why = "its tensors do not have the same number of rows" if 0 in everyone else "it is down to single rows"
            raise torch.OutOfMemoryError(
                f"hf_zero: a micro-batch ran out of memory. It cannot be halved: {why}. Use activation checkpointing, "
                f"`offload`, or shorter rows. What ran out: {reason}"
            )
        self.parts *= 2
        if self._engine.world_groups.rank == 0:
            _log.warning(
                "hf_zero: a micro-batch of %d rows ran out of memory (%s). The step is taken again, and from now on each "
                "micro-batch in %d parts: the same sums, except for dropout, which draws other numbers, and batch norm, whose "
                "statistics are those of each part.",
                max(everyone),
                reason.partition("\n")[0][:200],
                self.parts,
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocation that failed, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _STATEMENTS)


def _tried(run: Pass, inputs: Any, weight: float) -> tuple[torch.Tensor | None, str | None]:
    # The error is not handed on: its traceback keeps the activations.
    try:
        return run(inputs, weight), None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
