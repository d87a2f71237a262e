"""The check of copies at the turns of a training step."""

from collections.abc import Sequence

import torch

from ..buckets.bucket import Bucket, ParameterSlot
from ..comm.collective_log import CollectiveLog
from ..optimizer.replicas import ReplicaCheck
from ..stage3.unit import Unit
from .parameter_gather import ParameterGather


class StepReplicas:
    """Calls `ReplicaCheck` before and after each update, and hands over what the search for edits has found in stage 3's passes.

    Args:
        check: compares the copies.
        stepped: each optimizer with its buckets.
        gather: tells the check of arrived parameters.
        units: the units of stage 3, which are whole during a pass.
        log: counts the steps.
    """

    def __init__(
        self,
        check: ReplicaCheck,
        stepped: Sequence[tuple[torch.optim.Optimizer, Sequence[Bucket]]],
        gather: ParameterGather,
        units: Sequence[Unit],
        log: CollectiveLog,
    ):
        self._check = check
        self._stepped = stepped
        self._gather = gather
        self._units = units
        self._log = log
        gather.replicas = check
        self._watch(log.step + 1)
        for optimizer, buckets in stepped:
            check.after_update(optimizer, buckets)

    def before_update(self, index: int, *, always_compares: bool) -> None:
        """Called before the update of an optimizer, given by its index. Compares the copies if due or `always_compares`."""
        step = self._log.step
        self._check.before_update(step, *self._stepped[index])
        # The first optimizer counts the steps.
        if index == 0:
            if always_compares or self._check.is_due(step + 1):
                self._check.compare(step + 1, self._changes_of_gathered())
            # Watch for the next comparison from here on, since this update's gathers precede it.
            self._watch(step + 2)

    def compare_now(self) -> None:
        """Compares the copies before gradients are reported as bad, because corrupted parameters are a common cause."""
        step = self._log.step
        self._gather.finish_all()
        for optimizer, buckets in self._stepped:
            self._check.before_update(step, optimizer, buckets)
        self._check.compare(step + 1, self._changes_of_gathered())

    def _watch(self, step: int) -> None:
        """Records checksums of values that last for less than a step, if copies are compared before this step's update."""
        self._check.watch(step)
        for unit in self._units:
            unit.unseen.watch(is_told=self._check.watches)

    def _changes_of_gathered(self) -> list[tuple[list[ParameterSlot], torch.Tensor]]:
        """Returns and clears the findings of `UnseenEdits` for all ranks."""
        found = [unit.unseen.for_all_ranks for unit in self._units]
        for unit in self._units:
            unit.unseen.for_all_ranks = None
        return [each for each in found if each is not None]
