"""Detects writes to the optimizer's parameters outside of `step()`, and sends them to the other ranks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket
from ..buckets.memory import UnshardedMemory
from ..comm.transport import Transport
from ..comm.waits import Label
from ..config import ZeroConfig
from ..engine.parts import Parts
from ..hooks.weak import WeakHook
from ..optimizer.replicas import checksums
from ..optimizer.schedule_free import TrainModes


class RowWrites:
    """Sends writes to rows outside of `optimizer.step()` to all ranks.

    `optimizer.param_groups` contains this rank's rows. Other ranks have copies of the rows, and so does this rank if there is a
    separate master. Only a step updates copies. Schedule-free optimizers write to rows in `train()` and `eval()`, and scripts
    write to rows to clamp weights or to swap in averaged ones. Autograd's version counters show such writes, except writes
    through `.data` or numpy.

    Args:
        parts: the parts of the engine, with the buckets of this rank's rows. Buckets without copies are ignored.
        transport: agrees on the written buckets.
    """

    def __init__(self, parts: Parts, transport: Transport):
        self._parts = parts
        self._known = {bucket: bucket.row_writes for bucket in parts.buckets if _is_copied(bucket)}
        self._sums: dict[Bucket, int] | None = None
        self._transport = transport

    def watch(
        self, models: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer], config: ZeroConfig
    ) -> list[TrainModes | RemovableHandle]:
        """Makes the models' `state_dict()` refuse unsent writes, and the optimizers' `train()` and `eval()` send theirs.

        Returns:
            Objects whose `remove()` ends this.

        Raises:
            ValueError: the `train()` and `eval()` of an optimizer cannot write to its state.
        """
        asked = WeakHook(self, RowWrites._before_state_dict)
        # The optimizers' state is in memory and up to date between steps, unless buckets are stepped one by one.
        is_possible = not config.steps_by_bucket
        modes = [TrainModes(each, is_possible=is_possible, writing=self.writing) for each in optimizers]
        return [*(model.register_state_dict_pre_hook(asked) for model in models), *modes]

    def follow(self, buckets: Iterable[Bucket]) -> None:
        """Counts all writes so far as sent, for these buckets."""
        for bucket in filter(self._known.__contains__, buckets):
            self._known[bucket] = bucket.row_writes

    def refuse_unsent(self, doing: str) -> None:
        """Raises RuntimeError for an unsent write to this rank's rows."""
        for bucket, known in self._known.items():
            if bucket.row_writes != known:
                names = [row.slot.name for row in bucket.rows]
                more = f" and {len(names) - 1} other parameters of its bucket" if len(names) > 1 else ""
                raise RuntimeError(
                    f"hf_zero: {doing}, but values of {names[0]}{more} in optimizer.param_groups were edited after the last "
                    "optimizer.step(), so other ranks have old values. Call `engine_of(model).synchronize()` on all ranks "
                    "after such an edit."
                )

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Sends the writes to rows inside the context, by any rank. Collective."""
        # End running gathers first: a gather reads the rows, and would send half of the write.
        self._parts.end_reads()
        yield
        self.send(what)

    def send(self, what: str) -> None:
        """Sends writes to rows since the last call, by any rank. Collective.

        Args:
            what: the writer's name, for the collective's label.
        """
        self._send_written([bucket.row_writes != known for bucket, known in self._known.items()], what)

    def _send_written(self, is_written: Sequence[bool], what: str) -> None:
        if not self._known:
            return
        # All ranks send the same buckets, because a write on only one rank must still meet a gather on the others.
        agreed = self._transport.agree_max(
            torch.tensor(is_written, dtype=torch.uint8), Label(kind="agreement on written parameters", subject=what)
        ).tolist()
        buckets = [bucket for bucket, is_due in zip(self._known, agreed) if is_due]
        if buckets:
            self._parts.end_reads()
            self.renew_copies(buckets)

    def begin_hooks(self) -> None:
        """Notes the rows before a script's hooks at the end of a step, which read stepped parameters and may edit rows."""
        self._parts.end_reads()
        self._sums = self._sums_of_rows()

    def end_hooks(self) -> None:
        """Sends the rows edited by a script's hooks, on any rank. Collective if `begin_hooks` was called."""
        if self._sums is None:
            return
        # Compare values, because a hook may edit rows through `.data`, which changes no version.
        before, self._sums = self._sums, None
        now = self._sums_of_rows()
        is_edited = [before.get(bucket) != now.get(bucket) for bucket in self._known]
        self._send_written(is_edited, "hooks on the optimizer's step")

    def _sums_of_rows(self) -> dict[Bucket, int]:
        # A bucket outside of memory has no rows for a script to edit.
        here = {str(index): bucket for index, bucket in enumerate(self._known) if not bucket.is_away and bucket.rows}
        sums = checksums({name: bucket.master for name, bucket in here.items()})
        return {bucket: sums[name] for name, bucket in here.items()}

    def renew_copies(self, buckets: Sequence[Bucket]) -> None:
        """Sends the rows of these buckets to all of their copies. Collective."""
        for bucket in buckets:
            bucket.write_back()
        self._parts.send(buckets)
        self.follow(buckets)

    def _before_state_dict(self, _module: nn.Module, *_args: object) -> None:
        self.refuse_unsent("a state dict is requested")


def _is_copied(bucket: Bucket) -> bool:
    # At stage 3 without a separate master, a row is the only copy of its elements.
    return not bucket.rows_are_parameters and (isinstance(bucket.memory, UnshardedMemory) or bucket.has_second_copy)
