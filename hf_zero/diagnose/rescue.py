"""Repeats a micro-batch in halves when a rank runs out of memory."""

import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..engine.engine import ZeroEngine

# ---- Cuts a batch into parts along its rows ----

IGNORED = -100
"""Label of a token without a loss."""


class Part(NamedTuple):
    """Some rows of a batch.

    Attributes:
        weight: weight of the part's mean loss in the batch's; 0 for a part that only other ranks need.
    """

    inputs: Any
    weight: float


def rows_of(batch: Any) -> int | None:
    """Returns the number of rows of a batch; None if its tensors disagree, so the batch cannot be cut.

    A tensor whose first dimension is 1 belongs to all rows.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim() > 0}
    sizes = sizes - {1} or sizes
    return sizes.pop() if len(sizes) == 1 else None


def cut(batch: Any, count: int) -> list[Part]:
    """Cuts a batch into `count` parts of equal size if possible; larger parts come first.

    If the batch has fewer rows, its first row fills the remaining parts with weight 0.

    Raises:
        ValueError: the batch has no rows to cut along.
    """
    rows = rows_of(batch)
    if rows is None:
        raise ValueError("the tensors of the batch do not have the same number of rows")
    bounds = [(rows * i // count, rows * (i + 1) // count) for i in range(count)]
    spans = sorted(bounds, key=lambda span: span[0] - span[1])
    whole = _numbers(batch, 0, rows)
    parts = []
    for start, stop in spans:
        is_empty = start == stop
        inputs = _rows(batch, rows, 0, 1) if is_empty else _rows(batch, rows, start, stop)
        weight = 0.0 if is_empty or not whole else _numbers(batch, start, stop) / whole
        parts.append(Part(inputs, weight))
    return parts


def _numbers(batch: Any, start: int, stop: int) -> int:
    """Counts the terms of a mean loss: labels of tokens with a loss, otherwise rows."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        return int((labels[start:stop] != IGNORED).sum())
    return stop - start


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, list | tuple):
        return [tensor for value in batch for tensor in _tensors(value)]
    return []


def _rows(batch: Any, rows: int, start: int, stop: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        return {name: _rows(value, rows, start, stop) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        is_of_rows = isinstance(batch, list) and len(batch) == rows and not _tensors(batch)
        return batch[start:stop] if is_of_rows else type(batch)([_rows(value, rows, start, stop) for value in batch])
    return batch


# ---- Micro-batches repeated in parts after running out of memory ----

_log = logging.getLogger(__name__)

Pass = Callable[[Any, float], torch.Tensor]
"""Runs forward and backward for rows, given the weight of their mean loss in the micro-batch's; returns the weighted loss."""

_STATEMENTS = ("out of memory", "can't allocate memory")


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    batch: Any
    run: Pass


class Rescue:
    """Runs the micro-batches of a step, and repeats all of them in more parts if one runs out of memory.

    All ranks cut micro-batches into the same number of parts, and keep this number for the remaining run. This works at stages 0
    to 2. At stage 3 the other ranks would wait in gathers for the rank that failed.

    Attributes:
        parts: number of parts into which a micro-batch is cut.
    """

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._taken: list[_MicroBatch] = []
        self.parts = 1

    def serves(self, engine: ZeroEngine) -> bool:
        """Whether this rescue belongs to `engine`, and not to an earlier one."""
        return self._engine is engine

    def run(self, batch: Any, run: Pass, *, ends_step: bool) -> torch.Tensor:
        """Runs forward and backward of one micro-batch, in parts if necessary; returns its loss. Collective.

        Args:
            ends_step: the optimizer's step follows.

        Raises:
            torch.OutOfMemoryError: on all ranks, if a single row does not fit or a batch cannot be cut.
        """
        self._taken.append(_MicroBatch(batch=batch, run=run))
        todo = self._taken[-1:]
        while True:
            loss, failure = self._attempt(todo)
            if failure is None and loss is not None:
                break
            self._cut_more(failure or "on another rank")
            # The gradients of earlier micro-batches of the step are dropped as well, so repeat all of them.
            todo = self._taken
        if ends_step:
            self._taken = []
        return loss

    def _attempt(self, todo: list[_MicroBatch]) -> tuple[torch.Tensor | None, str | None]:
        """Returns (loss of the last part, None), or (None, reason of the failure)."""
        ended = self._engine.ended_backwards
        loss: torch.Tensor | None = None
        for each in todo:
            loss = None
            pieces = cut(each.batch, self.parts) if self.parts > 1 else [(each.batch, 1.0)]
            for index, (inputs, weight) in enumerate(pieces):
                is_last = each is todo[-1] and index == len(pieces) - 1
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
        """Doubles the number of parts, if any micro-batch of the step has enough rows on some rank."""
        rows = [rows_of(each.batch) for each in self._taken]
        mine = 0 if None in rows else max(row for row in rows if row is not None)
        everyone = self._engine.world.exchange(mine)
        if 0 in everyone or max(everyone) <= self.parts:
            self._taken = []
            why = (
                "its tensors do not have the same number of rows"
                if 0 in everyone
                else "its parts are single rows already"
            )
            raise torch.OutOfMemoryError(
                f"hf_zero: a micro-batch ran out of memory. It cannot be halved: {why}. Use activation checkpointing, "
                f"`offload`, or shorter rows. The original error: {reason}"
            )
        self.parts *= 2
        if self._engine.world_groups.rank == 0:
            _log.warning(
                "hf_zero: a micro-batch of %d rows ran out of memory (%s). The step is repeated, and from now on each "
                "micro-batch runs in %d parts. The sums are the same, except that dropout draws different numbers and batch "
                "norm uses the statistics of each part.",
                max(everyone),
                reason.partition("\n")[0][:200],
                self.parts,
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _STATEMENTS)


def _tried(run: Pass, inputs: Any, weight: float) -> tuple[torch.Tensor | None, str | None]:
    # Do not return the error, because its traceback keeps activations alive.
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
