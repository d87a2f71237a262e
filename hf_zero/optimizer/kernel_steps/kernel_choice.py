"""Which buckets kernels step: those whose state is in the training device's memory, as far as kernels know the optimizer."""

import logging
from collections.abc import Mapping, Sequence

import torch

from ...buckets.bucket import Bucket, Row
from ...buckets.gradient_tensors import Coefficient, clip_later
from ..clip import scale_gradients
from ..holders.block_state import StateInBlocks
from ..reports import KernelReport
from ..state.bucket_state import BucketState
from ..state.bucket_steps import BucketStep, LentStep
from ..state.holder import Assigned, StepChoice
from .kernel_forms import form_in_blocks_of
from .kernel_step import FoundInf, KernelStep, KernelStepInBlocks, kernel_of

_log = logging.getLogger(__name__)


class KernelShare:
    """Which buckets kernels step, and why they leave the others to the optimizers' own steps."""

    def __init__(self):
        self._kernels: list[KernelStep] = []
        self._mine: set[Bucket] = set()
        self._bucket_count = 0
        self._hindrances: dict[str, None] = {}

    def take(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], kernel: KernelStep | None, *, else_why: str
    ) -> list[Bucket]:
        """Those of the optimizer's buckets that `kernel` steps from now on.

        State in another tier is stepped there, by the optimizer, and does not count.

        Args:
            kernel: None where none does what the optimizer does; `else_why` says so.
        """
        here = [bucket for bucket in buckets if not bucket.tier.is_apart]
        self._bucket_count += len(here)
        if kernel is None:
            if here:
                self._leave(else_why)
            return []
        hindrance_of = {bucket: kernel.hindrance(bucket) for bucket in here}
        for hindrance in filter(None, hindrance_of.values()):
            self._leave(f"{type(optimizer).__name__}, {hindrance}")
        mine = [bucket for bucket, hindrance in hindrance_of.items() if hindrance is None]
        self._mine.update(mine)
        self._kernels.append(kernel)
        for bucket in mine:
            bucket.step_on_reduced()
        return mine

    def unwritten(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Those of the buckets whose parameters no kernel has written beside the master since the last call."""
        written = {bucket for kernel in self._kernels for bucket in kernel.take_written()}
        return [bucket for bucket in buckets if bucket not in written]

    def clip_later(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> list[Row]:
        """Leaves it to the kernels to multiply the gradients that they are to read; the rows of the others.

        See `ClippedGradient`.
        """
        if coefficient is None:
            return []
        one = Coefficient(coefficient)
        left = []
        for row in rows:
            if row.slot.bucket in self._mine and not row.is_parameter:
                clip_later(row.tensor, one)
            else:
                left.append(row)
        return left

    def report(self) -> KernelReport:
        return KernelReport(buckets=len(self._mine), all_buckets=self._bucket_count, hindrances=tuple(self._hindrances))

    def _leave(self, hindrance: str) -> None:
        if hindrance not in self._hindrances:
            self._hindrances[hindrance] = None
            _log.info("hf_zero: buckets are left to the optimizer's own step: %s.", hindrance)


class KernelSteps(StepChoice):
    """Buckets whose optimizer a kernel can stand for are stepped by it; the others are left to the optimizer's own step.

    Moments in 8-bit blocks that a kernel can step there never leave them. See [Note: steps by kernels].

    Args:
        found_inf: whether gradients are not finite; see `FoundInf`.
    """

    def __init__(self, found_inf: FoundInf):
        self._found_inf = found_inf
        self._share = KernelShare()

    def assign(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> list[Assigned]:
        found = [self._in_blocks(optimizer, states), self._at_hand(optimizer, states), self._rounded(optimizer, states)]
        return [assigned for assigned in found if assigned.states]

    def scale_gradients(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
        scale_gradients(self._share.clip_later(rows, coefficient), coefficient)

    def unwritten(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        return self._share.unwritten(buckets)

    def report(self) -> KernelReport:
        return self._share.report()

    def _in_blocks(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> Assigned:
        there = {bucket: state.state for bucket, state in states.items() if not state.master.is_away}
        blocks = {bucket: state for bucket, state in there.items() if isinstance(state, StateInBlocks)}
        form, kernel = form_in_blocks_of(optimizer), None
        if form is not None:
            unpacked = LentStep(optimizer, states)
            kernel = KernelStepInBlocks(optimizer, form, self._found_inf, unpacked, blocks)
        why = f"no kernel does what {type(optimizer).__name__} does on moments in 8 bits"
        return self._assigned(optimizer, list(blocks), kernel, why)

    def _at_hand(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> Assigned:
        """Masters and moments in memory, in all their digits."""
        why = f"no kernel does what {type(optimizer).__name__} does"
        buckets = [bucket for bucket, state in states.items() if not state.is_away]
        return self._assigned(optimizer, buckets, kernel_of(optimizer, self._found_inf), why)

    def _rounded(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> Assigned:
        """Masters that are rounded away, which a kernel steps while they are there."""
        kernel = kernel_of(optimizer, self._found_inf)
        if kernel is None:
            return Assigned(BucketStep(optimizer), {})
        away = {bucket: state for bucket, state in states.items() if state.master.is_away and state.shard is None}
        return Assigned(kernel, {bucket: state for bucket, state in away.items() if not state.state.is_away})

    def _assigned(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], kernel: KernelStep | None, else_why: str
    ) -> Assigned:
        mine = self._share.take(optimizer, buckets, kernel, else_why=else_why)
        return Assigned(kernel or BucketStep(optimizer), dict.fromkeys(mine))
