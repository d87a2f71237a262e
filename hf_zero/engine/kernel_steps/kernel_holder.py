"""State in the training device's memory that kernels step."""

import logging
from collections.abc import Sequence

import torch

from ...comm.local import LocalTransport
from ..buckets.bucket import Bucket, Row
from ..gradients.clipped_gradient import Coefficient, clip_later
from ..gradients.nonfinite import NonFiniteCheck
from ..holders.bucket_holder import SteppedByBucket
from ..holders.eight_bit_holder import InEightBits
from ..report_tables import KernelReport
from ..state.bucket_steps import BucketSteps, InTurn, OwnStep, Within
from ..state.holder import InMemory
from .kernel_forms import form_in_blocks_of, form_of
from .kernel_step import KernelStep, KernelStepInBlocks

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
                clip_later(row, one)
            else:
                left.append(row)
        return left

    def report(self) -> KernelReport:
        return KernelReport(buckets=len(self._mine), all_buckets=self._bucket_count, hindrances=tuple(self._hindrances))

    def _leave(self, hindrance: str) -> None:
        if hindrance not in self._hindrances:
            self._hindrances[hindrance] = None
            _log.info("hf_zero: buckets are left to the optimizer's own step: %s.", hindrance)


class _WithKernels(SteppedByBucket):
    """What a holder of buckets leaves to kernels, whatever form their state has."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], nonfinite: NonFiniteCheck):
        super().__init__(optimizers)
        self._nonfinite = nonfinite
        self._share = KernelShare()

    def scale_gradients(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
        super().scale_gradients(self._share.clip_later(rows, coefficient), coefficient)

    def after_step(self, buckets: Sequence[Bucket]) -> None:
        super().after_step(self._share.unwritten(buckets))

    def kernel_report(self) -> KernelReport:
        return self._share.report()


class SteppedByKernels(_WithKernels, InMemory):
    """Buckets whose optimizer a kernel can stand for are stepped by it; the others are left to the optimizer's own step.

    See [Note: steps by kernels].
    """

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        mine, kernel = _take(self._share, optimizer, buckets, self._nonfinite)
        if mine and kernel is not None:
            self._add(_in_turn(optimizer, mine, kernel), kernel)


class InEightBitsByKernels(_WithKernels, InEightBits):
    """The same for moments in 8-bit blocks: those that a kernel can step there never leave them.

    The others are unpacked for their optimizer's step.
    """

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        packed = [bucket for bucket in buckets if self.packed.takes(bucket)]
        others = [bucket for bucket in buckets if bucket not in packed]
        in_blocks, kernel_in_blocks = self._take_in_blocks(optimizer, packed)
        plain, kernel = _take(self._share, optimizer, others, self._nonfinite)
        for mine, step in ((in_blocks, kernel_in_blocks), (plain, kernel)):
            if mine and step is not None:
                self._add(_in_turn(optimizer, mine, step), step)
        for bucket in in_blocks:
            self._put_earlier(optimizer, bucket)
        super().step_with(optimizer, [bucket for bucket in packed if bucket not in in_blocks])

    def _take_in_blocks(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]
    ) -> tuple[list[Bucket], KernelStep | None]:
        form, kernel = form_in_blocks_of(optimizer), None
        if form is not None:
            unpacked = Within(OwnStep(optimizer), bring=self._bring, put=self._put_back)
            kernel = KernelStepInBlocks(optimizer, form, self._nonfinite, unpacked, self.packed)
        why = f"no kernel does what {type(optimizer).__name__} does on moments in 8 bits"
        return self._share.take(optimizer, buckets, kernel, else_why=why), kernel


def _take(
    share: KernelShare, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], nonfinite: NonFiniteCheck
) -> tuple[list[Bucket], KernelStep | None]:
    """Those of the buckets that a kernel steps on state in float32, and that kernel's step."""
    form = form_of(optimizer)
    kernel = None if form is None else KernelStep(optimizer, form, nonfinite, OwnStep(optimizer))
    why = f"no kernel does what {type(optimizer).__name__} does"
    return share.take(optimizer, buckets, kernel, else_why=why), kernel


def _in_turn(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], kernel: KernelStep) -> BucketSteps:
    """No disk can fail under one rank alone, so none has to wait for a word from the others."""
    shards = {bucket: bucket for bucket in buckets}
    return BucketSteps(optimizer, shards, InTurn(), step=kernel, transport=LocalTransport())
