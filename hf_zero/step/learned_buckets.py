"""How buckets fill during a pass, and which hooks watch their gradients."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot

Hook = Callable[[torch.Tensor], None]

_FIRST_PASSES, _MOST_PASSES = 2, 64
"""Passes that must fill a bucket in the same order before one hook handles it: at first, and at most."""

# [Note: one hook a bucket]
# A Python hook on each parameter costs the host more time than the reduction itself. Most models fill their buckets in the same
# order in each pass. So if the same parameter completes a bucket in two passes, the bucket is *learned*: from then on, only the
# hook on that parameter runs Python, and handles the gradients of the whole bucket. The other hooks are `list.append`, in C.
#
# The list records which gradients have arrived, and in which order, so a wrong guess loses nothing. The last hook cannot handle
# the bucket as a whole if gradients are still missing, if one is undefined or was added to an earlier one, or if the pass only
# accumulates. Then the gradients in the list are handled one by one, as separate hooks would have done: at once, before the
# bucket starts, or at the end of the pass. After that, each parameter of the bucket has a Python hook again, each time for
# twice as many passes.


class Filling:
    """How much of a bucket is filled in the running pass, and which hooks watch its gradients. See [Note: one hook a bucket].

    Attributes:
        index: index of the bucket.
        awaited: number of slots without a gradient.
        arrived: in a learned bucket, the parameters whose gradients have arrived but are not handled yet, in their order.
        last: in a learned bucket, the slot whose hook handles all gradients; else None.
        is_whole: all gradients of this pass were handled together.
        completed_by: the slot that completed the bucket in this pass; only meaningful if all gradients were plain tensors.
        bytes_to_come: when the bucket was completed, the bytes of all buckets without any gradient yet.
    """

    __slots__ = (
        *(
            "_completed_before",
            "_hook_dicts",
            "_hook_ids",
            "_in_a_row",
            "_wanted",
            "arrived",
            "awaited",
            "bucket",
            "bytes_to_come",
            "completed_by",
        ),
        *("first", "is_plain", "is_whole", "last", "index", "slot_of"),
    )

    def __init__(self, bucket: Bucket, index: int, first: int):
        self.bucket = bucket
        self.index = index
        self.first = first
        self.awaited = 0
        self.arrived: list[torch.Tensor] = []
        self.slot_of = {slot.parameter: slot for slot in bucket.slots}
        self.last: ParameterSlot | None = None
        self.is_whole = False
        self.is_plain = True
        self.completed_by: ParameterSlot | None = None
        self.bytes_to_come = 0
        self._completed_before: ParameterSlot | None = None
        self._in_a_row, self._wanted = 0, _FIRST_PASSES
        self._hook_dicts: list[MutableMapping[int, Any]] = []
        self._hook_ids: list[int] = []

    @property
    def has_begun(self) -> bool:
        """Whether gradients have arrived in this pass."""
        return self.awaited < len(self.bucket.slots) or bool(self.arrived)

    @property
    def buffer_bytes(self) -> int:
        """Returns the bytes of the bucket's whole gradient in the reduce dtype."""
        bucket = self.bucket
        return bucket.layout.numel * bucket.precision.reduce.itemsize

    @property
    def is_alone(self) -> bool:
        """Whether no parameter has a hook of the script, which would find different values in `p.grad` than in earlier passes."""
        return {1}.issuperset(map(len, self._hook_dicts))

    def install(self, hooks: Sequence[Hook]) -> list[RemovableHandle]:
        """Registers a hook on each slot's parameter; returns the removable handles."""
        handles = [
            slot.parameter.register_post_accumulate_grad_hook(hook) for slot, hook in zip(self.bucket.slots, hooks)
        ]
        self._hook_dicts, self._hook_ids = [each.hooks_dict_ref() for each in handles], [each.id for each in handles]
        return handles

    def learn(self, last: Hook) -> None:
        """Keeps one Python hook, `last`, on the parameter of the last slot; the other hooks become `list.append`."""
        hooks: list[Any] = [self.arrived.append] * len(self.bucket.slots)
        hooks[cast(ParameterSlot, self.last).number] = last
        self._replace_hooks(hooks)

    def watch_again(self, hooks: Sequence[Hook]) -> None:
        """Makes the hooks of all parameters Python hooks again."""
        self.last = None
        self._replace_hooks(hooks)

    def _replace_hooks(self, new: Sequence[Hook]) -> None:
        # Replaced in torch's own dict: torch refuses to register a hook on a parameter that is frozen now.
        for hooks, number, hook in zip(self._hook_dicts, self._hook_ids, new):
            # A removed handle has deleted its entry.
            if number in hooks:
                hooks[number] = hook

    def is_learned_now(self) -> bool:
        """Whether the bucket is learned. Called after each reducing pass in which all of its parameters had Python hooks."""
        by = self.completed_by if self.is_plain else None
        self._in_a_row = self._in_a_row + 1 if by is not None and by is self._completed_before else int(by is not None)
        self._completed_before = by
        if self._in_a_row < self._wanted or not self.is_alone:
            return False
        self._wanted, self._in_a_row = min(2 * self._wanted, _MOST_PASSES), 0
        self.last = by
        return True
