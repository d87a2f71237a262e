"""State in the training device's memory that kernels step."""

import logging
from collections.abc import Sequence

import torch

from ..comm.local import LocalTransport
from .bucket_holder import SteppedByBucket
from .bucket_steps import BucketSteps, InTurn
from .buckets import Bucket
from .holder import InMemory
from .kernel_forms import form_of
from .kernel_step import KernelStep
from .nonfinite import NonFiniteCheck
from .reports import KernelReport

_log = logging.getLogger(__name__)


class SteppedByKernels(SteppedByBucket, InMemory):
    """Buckets whose optimizer a kernel can stand for are stepped by it; the others are left to the optimizer's own step.

    See [Note: steps by kernels]. State in another tier is stepped there, by the optimizer.
    """

    def __init__(self, nonfinite: NonFiniteCheck):
        super().__init__()
        self._nonfinite = nonfinite
        self._kernels: list[KernelStep] = []
        self._bucket_count = self._taken = 0
        self._hindrances: dict[str, None] = {}

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        here = [bucket for bucket in buckets if not bucket.tier.is_apart]
        self._bucket_count += len(here)
        form = form_of(optimizer)
        if form is None:
            self._leave(f"no kernel does what {type(optimizer).__name__} does")
            return
        kernel = KernelStep(optimizer, form, self._nonfinite)
        hindrance_of = {bucket: kernel.hindrance(bucket) for bucket in here}
        for hindrance in filter(None, hindrance_of.values()):
            self._leave(f"{type(optimizer).__name__}, {hindrance}")
        mine = {bucket: bucket for bucket, hindrance in hindrance_of.items() if hindrance is None}
        if mine:
            self._taken += len(mine)
            self._kernels.append(kernel)
            # No disk can fail under one rank alone, so none has to wait for a word from the others.
            self._add(BucketSteps(optimizer, mine, InTurn(), step=kernel, transport=LocalTransport()), kernel)

    def after_step(self, buckets: Sequence[Bucket]) -> None:
        written = {bucket for kernel in self._kernels for bucket in kernel.take_written()}
        super().after_step([bucket for bucket in buckets if bucket not in written])

    def kernel_report(self) -> KernelReport:
        return KernelReport(buckets=self._taken, all_buckets=self._bucket_count, hindrances=tuple(self._hindrances))

    def _leave(self, hindrance: str) -> None:
        if hindrance not in self._hindrances:
            self._hindrances[hindrance] = None
            _log.info("hf_zero: buckets are left to the optimizer's own step: %s.", hindrance)
