"""One backward pass: gradients fill buckets, full buckets are reduced, and the end of the pass reduces the remaining ones."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse, repeat
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.gradients import drop_gradients
from ..buckets.sharded_gradient import ShardedGradient
from ..comm.transport import Transport
from ..comm.waits import Label
from ..hooks.guards import look_only
from ..hooks.modes import dispatch_modes, hidden_from_modes, without_modes
from ..hooks.tensors import differentiable_tensors, is_in_backward, set_all
from ..optimizer.shared_settings import SharedSettings
from .common_starts import CommonStarts
from .failed_pass import FailedPass
from .gradient_store import GradientStore
from .learned_buckets import Filling, Hook
from .step_context import StepContext

_USED = Label(kind="agreement on used parameters", subject="this pass")

_GRAD, _ARRIVED, _PARAMETER = attrgetter("grad"), attrgetter("arrived"), attrgetter("parameter")
_IS_WHOLE = attrgetter("is_whole")
_LOST = 255
"""Sent instead of a signal's number by a rank whose backward has failed; signals have smaller numbers."""


def no_signal() -> int:
    """Returns 0: no signal asks this rank to stop, because nobody listens for signals."""
    return 0


class Gradients:
    """Receives gradients from autograd's hooks and drives the store.

    Every rank starts the buckets in the same fixed order: a bucket starts as soon as this bucket and all before it are full. So
    ranks whose gradients arrive in different orders still match their collectives. At the end of backward the remaining buckets
    start, with zeros for missing gradients. The ranks then agree on the used parameters. As under DDP, a parameter that no
    rank used keeps its earlier gradient, which may be None.

    Args:
        step: called at the end of each backward.
        find_unused_parameters: see `ZeroEngine`.

    Attributes:
        store: keeps the gradients until the step.
        starts: counts the reductions that all ranks have started.
        transport: connects the ranks that step together.
        stop_asked: returns the number of the signal that asks this rank to stop, 0 for none.
        stop_agreed: the largest signal number of all ranks at the end of their backward; 0 if no rank had a signal.
        settings_differ: the ranks had different step settings at the end of a backward; see `SharedSettings`.
        reducing: False while micro-batches only accumulate.
        ended: number of finished backward passes.
        may_pass_over: buckets may start before all of their gradients have arrived; see `start_passed_over`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        store: GradientStore,
        transport: Transport,
        world_size: int,
        settings: SharedSettings,
        step: StepContext,
        *,
        find_unused_parameters: bool,
    ):
        self._world_size = world_size
        # With one rank nothing is reduced, so an undefined gradient stays None, as in plain PyTorch.
        self._fills_undefined = world_size > 1 and not find_unused_parameters
        self._buckets = list(buckets)
        # In order of the trained buckets. The layout's indices also count buckets of frozen parameters.
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._fillings: list[Filling] = []
        for bucket in self._buckets:
            first = self._fillings[-1].first + len(self._fillings[-1].bucket.slots) if self._fillings else 0
            self._fillings.append(Filling(bucket, len(self._fillings), first))
        self._filling_of = {filling.bucket: filling for filling in self._fillings}
        self._counts = [len(bucket.slots) for bucket in self._buckets]
        self.store = store
        self.transport = transport
        # A parameter's hook holds a list of parameters. Python's garbage collector does not see through torch's hooks, so a list
        # that a failed pass leaves full would keep the model alive.
        weakref.finalize(self, _clear, [filling.arrived for filling in self._fillings])
        self._next = 0
        self._held: set[ParameterSlot] = set()
        self._late: set[Bucket] = set()
        self._touched = False
        # Buckets of this pass started before the arrival of all of their gradients; see `start_passed_over`.
        self._passed_over: set[Bucket] = set()
        self.may_pass_over = True
        self.starts = store.starts = CommonStarts(len(self._buckets), step)
        store.index_of = {bucket: index for index, bucket in enumerate(self._buckets)}
        self.reducing = True
        self.stop_asked = no_signal
        self.stop_agreed = 0
        self._settings = settings
        self._digest = b""
        self.settings_differ = False
        self.ended = 0
        self._step = step
        # True from the first gradient of a pass to the end of the pass.
        self._end_is_queued = False
        # The callback in autograd's queue. Autograd drops the callback without a call if an exception ends the backward.
        self._end: weakref.ref[Any] | None = None
        self._failed = FailedPass(self._slots)
        # An output's hook has noticed this pass before any parameter's hook, so the end does not depend on parameters' hooks.
        self._is_announced = False
        self._begin_pass()

    def install(self) -> list[RemovableHandle]:
        """Registers a hook on every parameter; returns the removable handles."""
        return [handle for filling in self._fillings for handle in filling.install(self._hooks_of(filling))]

    def _hooks_of(self, filling: Filling) -> list[Hook]:
        return [_hook_of(self, filling.first + slot.number) for slot in filling.bucket.slots]

    def _learn(self) -> None:
        """After a reducing pass, switches buckets between one Python hook and a Python hook per parameter."""
        if all(map(_IS_WHOLE, self._fillings)):
            return
        for filling in self._fillings:
            if filling.last is None:
                takes_whole = self._is_announced and self.store.takes_whole(filling.bucket, filling.bytes_to_come)
                if takes_whole and filling.is_learned_now():
                    filling.learn(_last_hook_of(self, filling.index))
            elif not filling.is_whole:
                filling.watch_again(self._hooks_of(filling))

    def watch(self, outputs: object) -> None:
        """Hooks every differentiable tensor of the root module's outputs: the end of their backward ends the pass."""
        # An output's hook queues autograd's callback on the outer graph task. A parameter's hook may queue the callback on an
        # inner task of reentrant checkpointing, whose end is too early. Only losses that bypass the outputs depend on
        # parameters' hooks. For them an early end costs one more reduction, and no gradient is lost.
        tensors = differentiable_tensors(outputs)
        for tensor in tensors:
            tensor.register_hook(self._queue_end)
        if not tensors:
            # Only parameters' hooks can notice a backward that does not pass through an output.
            for filling in self._fillings:
                if filling.last is not None:
                    filling.watch_again(self._hooks_of(filling))

    def _queue_end(self, gradient: torch.Tensor | None = None) -> None:
        """Queues the end of the running pass, once per pass. Called inside a backward; an output's hook passes its gradient."""
        if not self._end_is_queued:
            if self._failed.error is not None:
                self._end_failed_pass()
            self._end_is_queued = True
            self._is_announced = gradient is not None
            end = self._end_pass
            self._end = weakref.ref(end, self._lose_pass)
            Variable._execution_engine.queue_callback(end)

    def complete(self) -> None:
        """Ends a pass in which only `list.append` hooks ran, so nothing has queued its end. Called outside any backward."""
        if not self._end_is_queued and any(map(_ARRIVED, self._fillings)):
            self._end_pass()

    def reduce_accumulated(self) -> None:
        """Reduces the accumulated gradients of earlier passes. Called outside any backward, on all ranks."""
        self.recover()
        self._touch()
        self._end_pass()

    def refuse_unreduced(self) -> None:
        """Raises `RuntimeError` if a gradient was accumulated without communication and has not been reduced since."""
        unreduced = [slot.name for slot in self._held if _is_unreduced(slot.parameter.grad)]
        if unreduced:
            raise RuntimeError(
                f"hf_zero: {len(unreduced)} gradients (first: {unreduced[0]!r}) were accumulated under no_sync and never "
                "reduced. Run the last backward before optimizer.step() outside no_sync (accelerator.accumulate does)."
            )

    def recover(self) -> None:
        """Ends an unfinished pass, so that gradients can be read or a forward can begin.

        Called outside any backward. See [Note: a failed backward].

        Raises:
            RuntimeError: on all ranks, if a backward has failed on one of several ranks; raised again by each later call.
        """
        if self._failed.error is not None:
            self._end_failed_pass()
        self.complete()

    def _show_lost(self) -> None:
        """Sets stand-ins as `p.grad` of handled gradients, for `FailedPass.is_zeroed` to detect the script's zero_grad."""
        for filling in self._fillings:
            for slot in filling.bucket.slots:
                if slot.parameter.grad is None and (slot.used or filling.is_whole):
                    slot.parameter.grad = ShardedGradient(slot.name, slot.parameter)

    def discard(self) -> None:
        """Forgets a failed pass on all ranks, with the gradients of all passes since the last step."""
        self._failed.forget()
        self.complete()
        self.store.finish_all()
        # After the wait, because a running reduction still reads its buffer.
        self.store.discard_open()
        self.drop()
        self._begin_pass()

    def _lose_pass(self, _end: object) -> None:
        """Called when an exception ends the running backward. Does not communicate: only this rank may have failed."""
        self._end_is_queued, self._end = False, None
        if not self.reducing:
            for filling in self._fillings:
                self._held.update(filling.slot_of[cast(nn.Parameter, parameter)] for parameter in filling.arrived)
            self._begin_pass()
        elif self._world_size > 1:
            had_gradients = any(filling.has_begun for filling in self._fillings)
            self._failed.note(had_gradients=had_gradients, goes_on=self.store.goes_on)
        else:
            # Also reduce the gradients accumulated by `no_sync` micro-batches.
            self._touched |= bool(self._held)
            try:
                with torch.no_grad():
                    self._end_pass(lost=True)
            except Exception as error:
                # Python prints and drops an exception raised in a weakref callback, so the next forward or step raises the error.
                self._failed.refuse(error)
                self._show_lost()

    @hidden_from_modes
    def _end_failed_pass(self) -> None:
        """Joins the collectives in which the other ranks wait, then raises the error of the failed pass."""
        if self._world_size == 1 and self._failed.is_zeroed:
            self.discard()
            return
        if self._failed.owed is not None:
            lost, self._failed.owed = self._failed.owed, None
            # The failed pass was reducing, but the script may have entered `no_sync` since.
            reducing, self.reducing = self.reducing, True
            # If the script has zeroed or edited gradients since, the edit cannot reach the other ranks' part of the sum.
            self.store.went_on = self._failed.goes_on
            # Even if no gradient has arrived on this rank, because the other ranks may reduce.
            self._touch()
            self._step.end_gathers()
            self._take_all_arrived()
            self._finish_pass(lost=lost)
            # The next backward may already run and have gathered layers, which `end_backward` would free.
            if not is_in_backward():
                self._step.end_backward()
            self.reducing = reducing
            self.store.went_on = None
        self._failed.raise_error()

    def join_remaining(self) -> None:
        """Finishes the pass on a rank whose forward or backward has failed, because the other ranks wait for its gradients.

        Sends zeros for missing gradients. Collective with the other ranks' backward.
        """
        self._end_is_queued, self._end = False, None
        self._failed.forget()
        if self.reducing and self._world_size > 1:
            self._finish_pass()

    @property
    def are_waiting(self) -> bool:
        """Whether gradients wait for the step of an optimizer, reduced or not."""
        rows = (slot.row for slot in self._slots if slot.bucket.key.optimizer >= 0)
        return bool(self._held) or any(row is not None and row.tensor.grad is not None for row in rows)

    def drop(self) -> None:
        """Forgets all gradients, reduced or not."""
        for slot in self._slots:
            slot.sharded_gradient.pending = None
        for bucket in self._buckets:
            drop_gradients(bucket)
        self._held.clear()

    def _begin_pass(self) -> None:
        fillings = self._fillings
        if not all(map(_IS_WHOLE, fillings)):
            for filling in fillings:
                # The slots of a bucket handled as a whole hold no notes, so they need no reset.
                for slot in () if filling.is_whole else filling.bucket.slots:
                    slot.used = slot.used_elsewhere = slot.continues = False
        set_all(fillings, "is_whole", repeat(False))
        set_all(fillings, "awaited", self._counts)
        set_all(fillings, "is_plain", repeat(True))
        set_all(fillings, "completed_by", repeat(None))
        _clear(map(_ARRIVED, fillings))
        self._next = self.starts.started = 0
        self._late.clear()
        self._passed_over.clear()
        self._touched = self._is_announced = False

    def take(self, slot: ParameterSlot) -> None:
        """Handles the accumulated gradient in `slot.parameter.grad`. Called by the parameter's hook."""
        if dispatch_modes():
            with without_modes():
                return self.take(slot)
        # Before any return: even if all gradients of the pass are undefined, the other ranks wait in the agreement at its end.
        if not self._end_is_queued:
            self._queue_end()
        self._take(slot, has_graph=torch.is_grad_enabled(), is_readable=slot.bucket.memory.is_readable)

    def take_bucket(self, filling: Filling) -> None:
        """Handles all gradients of a learned bucket together. Called by the hook on the parameter whose gradient arrives last."""
        if dispatch_modes():
            with without_modes():
                return self.take_bucket(filling)
        if not self._end_is_queued:
            self._queue_end()
        bucket = filling.bucket
        assert filling.last is not None
        filling.arrived.append(filling.last.parameter)
        if self._may_take_whole(filling):
            with look_only():
                gradients = list(map(_GRAD, bucket.parameters))
            # As in `_touch`.
            self._touched = True
            if self.store.put_whole(bucket, gradients):
                # Free the gradients before the reduction starts, which may need as much memory.
                del gradients
                filling.is_whole, filling.awaited = True, 0
                filling.arrived.clear()
                self.start_full()
                return
        self._take_arrived(filling, has_graph=torch.is_grad_enabled(), is_readable=bucket.memory.is_readable)

    def _may_take_whole(self, filling: Filling) -> bool:
        count = len(filling.bucket.slots)
        return (
            self.reducing
            and len(filling.arrived) == count == filling.awaited
            and filling.index >= self._next
            and filling.bucket.memory.is_readable
            and not torch.is_grad_enabled()
            and filling.is_alone
        )

    def _take_arrived(self, filling: Filling, *, has_graph: bool | None = None, is_readable: bool = True) -> None:
        """Handles the gradients in a learned bucket's list one by one, as Python hooks on the parameters would have."""
        if filling.is_whole and filling.arrived:
            # More gradients arrived after all were handled together, so from now on each slot needs its own notes.
            filling.is_whole = False
            for slot in filling.bucket.slots:
                slot.used = True
            self.store.note_slots(filling.bucket)
        arrived = list(dict.fromkeys(filling.arrived))
        # Cleared first. Otherwise, gradients would be handled twice after an error.
        filling.arrived.clear()
        for parameter in arrived:
            self._take(filling.slot_of[cast(nn.Parameter, parameter)], has_graph=has_graph, is_readable=is_readable)

    def _take_all_arrived(self) -> None:
        for filling in filter(_ARRIVED, self._fillings):
            self._take_arrived(filling)

    def _take(self, slot: ParameterSlot, *, has_graph: bool | None, is_readable: bool) -> None:
        """Handles one gradient.

        Args:
            has_graph: the backward was called with create_graph; None to ask the gradient's requires_grad instead.
            is_readable: the parameters of the layer are whole, or were when the gradient was computed.
        """
        gradient, bucket = slot.parameter.grad, slot.bucket
        # A `ShardedGradient` without a pending sum is left from an earlier pass: autograd has added nothing since.
        if gradient is None or (isinstance(gradient, ShardedGradient) and gradient.pending is None):
            self._take_undefined(slot)
            return
        if gradient.requires_grad if has_graph is None else has_graph:
            raise RuntimeError(
                f"hf_zero: the gradient of {slot.name!r} was computed by backward(create_graph=True), and its flat "
                "buffer has no graph. Use torch.autograd.grad(loss, ..., create_graph=True), and call "
                "loss.backward() without create_graph."
            )
        if gradient.is_sparse:
            # Of an embedding with `sparse=True`. A flat bucket has room for all of its rows.
            gradient = gradient.to_dense()
        if hasattr(gradient, "__tensor_flatten__"):
            raise RuntimeError(
                f"hf_zero: the gradient of {slot.name!r} is a {type(gradient).__name__}, which wraps other tensors, but "
                "buckets hold plain tensors. Return plain tensors from the layers that have weights of this class."
            )
        if not is_readable:
            raise RuntimeError(
                f"hf_zero: the gradient of {slot.name!r} was computed while its layer's parameters were sharded, so "
                "it is wrong. Return the layer's tensors in a tuple, list, dict, ModelOutput or dataclass, not in "
                "another object."
            )
        if not self.reducing:
            self.store.hold(slot, gradient)
            self._held.add(slot)
            return
        self._touch()
        slot.used = True
        filling = self._filling_of[bucket]
        if isinstance(gradient, ShardedGradient):
            gradient = cast(torch.Tensor, gradient.take_pending())
            filling.is_plain = False
        # The bucket's reduction has started, so a write to its buffer would change the other ranks' sums.
        if filling.index < self._next:
            self._late.add(bucket)
            filling.is_plain = False
            self.may_pass_over &= bucket not in self._passed_over
            self.store.put_late(slot, gradient)
            return
        # Count each slot once: reentrant checkpointing may compute several gradients of one parameter in a pass.
        if not slot.arrived:
            filling.awaited -= 1
        self.store.put(slot, gradient)
        if not filling.awaited:
            filling.completed_by = slot
            filling.bytes_to_come = sum(each.buffer_bytes for each in self._fillings if not each.has_begun)
            self.start_full()

    def _take_undefined(self, slot: ParameterSlot) -> None:
        """Handles a parameter whose hook ran without a gradient.

        As under DDP, the parameter counts as used, with a zero gradient; with `find_unused_parameters`, it counts as unused.
        """
        gradient = slot.parameter.grad
        # Autograd's addition to a spent gradient is dropped; see `ShardedGradient`.
        if not self.reducing or (isinstance(gradient, ShardedGradient) and gradient.is_spent):
            return
        # Other ranks may have a gradient of the parameter, and then reduce.
        self._touch()
        if not self._fills_undefined:
            return
        slot.used = True
        filling = self._filling_of[slot.bucket]
        filling.is_plain = False
        # If the bucket has started without this slot's gradient, the start has already written zeros.
        if slot.arrived or filling.index < self._next:
            return
        filling.awaited -= 1
        # Expanded from one element, so the zeros need no memory.
        zero = torch.zeros((), dtype=slot.parameter.dtype, device=slot.bucket.device)
        self.store.put(slot, zero.expand(slot.parameter.shape))
        if not filling.awaited:
            self.start_full()

    def _touch(self) -> None:
        """Marks this pass as one with gradients to reduce."""
        self._touched = True

    def start_passed_over(self, bucket: Bucket) -> bool:
        """Starts the next bucket although gradients are missing, if backward has moved on to `bucket`; returns whether it did.

        Otherwise an unused parameter, for example of a pooler, would keep all later buckets and their buffers waiting until the
        end of backward. Buckets with the same key fill one after the other, so a bucket that is not full when a later one has
        begun to fill will probably not become full. If its gradient does arrive, the gradient is late and needs a second
        reduction. Then the model's gradients do not follow the order of the buckets, and no bucket is passed over again.
        """
        index = self._filling_of[bucket].index
        if not self.may_pass_over or self._next >= index:
            return False
        passed_over = self._buckets[self._next]
        begun = [each for each in self._fillings if each.has_begun]
        later = [each for each in begun if self._next < each.index <= index]
        # If a bucket after `bucket` has begun to fill, gradients do not follow the order of the buckets, and the next bucket may
        # still fill up. Buckets with different keys are no evidence, because they fill at the same time as this one.
        if not later or begun[-1].index > index or all(each.bucket.key != passed_over.key for each in later):
            return False
        before = self._next
        self._take_arrived(self._fillings[before])
        # The arrived gradients have not completed the bucket.
        if self._next == before:
            self._start_next()
        self.start_full(up_to=index)
        return True

    def start_up_to(self, number: int) -> None:
        """Starts the first `number` buckets, full or not, including the last steps of their reductions. See `CommonStarts`."""
        if self.reducing:
            # `number` may be too large: ranks with a different part of a split model may have more buckets.
            number = min(number, len(self._buckets))
            if self._next < number:
                self._start_first(number)
            self.store.start_last_steps(number)

    def _start_first(self, number: int) -> None:
        if not self._touched and is_in_backward() and not self._accumulates():
            # A call of `torch.autograd.grad`, as in a gradient penalty, accumulates no gradients on any rank.
            return
        self._touch()
        for filling in self._fillings[:number]:
            if filling.arrived:
                self._take_arrived(filling)
        while self._next < number:
            self._start_next()
        self.start_full()

    def _start_next(self) -> None:
        """Starts the next bucket, full or not."""
        bucket, is_full = self._buckets[self._next], not self._fillings[self._next].awaited
        # Incremented first, because the store may start more buckets while waiting for a buffer.
        self._next += 1
        self.store.may_ask = False
        try:
            if is_full:
                self.store.start(bucket)
            else:
                self._passed_over.add(bucket)
                self.store.start_unfilled(bucket)
        except Exception:
            # The end of the failed pass starts this bucket again, because the other ranks wait for its reduction.
            self._next -= 1
            raise
        finally:
            self.store.may_ask = True
        self.starts.started = self._next

    def _accumulates(self) -> bool:
        """Whether the running backward will accumulate gradients."""
        if torch.is_grad_enabled() and Variable._execution_engine.is_checkpoint_valid():
            # Reentrant checkpointing recomputes a layer, whose graph does not exist yet. torch allows reentrant checkpointing
            # only in a backward that accumulates.
            return any(slot.parameter.requires_grad for slot in self._slots)
        return any(_accumulates(slot.parameter) for slot in self._slots)

    def start_full(self, *, up_to: int | None = None) -> None:
        """Starts the next buckets until one is not full, and only buckets before the index `up_to` if given."""
        buckets, fillings = self._buckets, self._fillings
        last = len(buckets) if up_to is None else up_to
        # In bucket order, not in the order in which buckets fill, because ranks match collectives by their order.
        while (index := self._next) < last and not fillings[index].awaited:
            self.store.start(buckets[index])
            self._next = self.starts.started = index + 1

    @hidden_from_modes
    def _end_pass(self, *, lost: bool | None = None) -> None:
        """Ends the running pass. `lost`: as in `_finish_pass`."""
        # Drop the weak reference first. Otherwise its callback, `_lose_pass`, would report a failure when autograd frees the end.
        self._end_is_queued, self._end = False, None
        try:
            # Before reductions start: other ranks may still wait in gathers, and have not started their reductions.
            self._step.end_gathers()
            self._take_all_arrived()
            if self._touched:
                self._finish_pass(lost=lost)
        except Exception:
            # The script may catch this exception. No step may follow, because gradients are missing.
            if self._failed.error is None:
                self._failed.refuse()
            if self._world_size == 1:
                self._show_lost()
            raise
        # Counted only now: a pass that fails in its last collectives has not ended.
        self.ended += 1
        self._step.end_backward()

    def _finish_pass(self, *, lost: bool | None = None) -> None:
        """Reduces all gradients of a pass.

        Args:
            lost: None if backward has finished. If an exception has ended backward on this rank: whether gradients had arrived
                before.
        """
        fillings = self._fillings
        if lost is not None and self._world_size == 1:
            # Skip buckets without gradients to allocate nothing for them, because backward may have run out of memory.
            fillings = [each for each in fillings if each.has_begun or not self._held.isdisjoint(each.bucket.slots)]
            for filling in fillings:
                if filling.index >= self._next:
                    self._next = filling.index + 1
                    self.store.start(filling.bucket)
            self._next = len(self._buckets)
        # Full or not: every rank starts all buckets of a pass, or other ranks would hang in a collective.
        while self._next < len(self._buckets):
            self.store.start(self._buckets[self._next])
            self._next += 1
        if self._passed_over:
            self._take_what_waits()
        # Started before the wait: the small message travels while this rank waits for the large ones.
        agreement = self._start_agreement(self.stop_asked() if lost is None or self._world_size == 1 else _LOST)
        self.store.finish_all()
        # After the reductions: on all ranks, late gradients are added to a finished sum.
        late = self._agree(agreement().tolist())
        for bucket in late:
            self.store.start_again(bucket)
        if late:
            self.store.finish_all()
        self.store.end_pass()
        slots = [slot for filling in filterfalse(_IS_WHOLE, fillings) for slot in filling.bucket.slots]
        if slots:
            with look_only():
                self.store.finish_slots(slots)
        # If `continues` is set, the gradient reduced in an earlier pass stays.
        for row in (slot.row for slot in slots if not slot.used):
            if row is not None and not row.slot.continues:
                # No rank used the parameter. As under DDP, the gradient is None, so the optimizer skips the parameter.
                row.tensor.grad = None
        self._held.clear()
        self._learn()
        self._begin_pass()
        if self.stop_agreed == _LOST:
            # `_LOST` has hidden a signal of another rank. The next pass asks for signals again.
            self.stop_agreed = 0
            self._failed.judge(self.transport, had_gradients=lost, goes_on=self.store.goes_on)
        elif self._world_size > 1:
            self.starts.learn(self.transport)

    def _take_what_waits(self) -> None:
        """Handles `no_sync` sums that `start_unfilled` left in `p.grad` and to which this pass added nothing."""
        # Emptied first: these sums are late by design, and must not count as evidence in `may_pass_over`.
        passed_over, self._passed_over = self._passed_over, set()
        for slot in (slot for bucket in passed_over for slot in bucket.slots):
            if not slot.used and _is_unreduced(slot.parameter.grad):
                self._take(slot, has_graph=None, is_readable=True)

    def _start_agreement(self, stop: int) -> Callable[[], torch.Tensor]:
        """Sends this rank's used parameters, its buckets with late gradients, `stop`, and its settings."""
        used = b"\1" * len(self._slots)
        if not all(map(_IS_WHOLE, self._fillings)):
            used = bytes(filling.is_whole or slot.used for filling in self._fillings for slot in filling.bucket.slots)
        late = bytes([bucket in self._late for bucket in self._buckets]) if self._late else bytes(len(self._buckets))
        self._digest = self._settings.digest()
        # Sent in one message, because each further message would add its latency to the end of every backward.
        local = bytearray(b"".join([used, late, bytes([stop]), self._digest]))
        return self.transport.start_agree_max(torch.frombuffer(local, dtype=torch.uint8), _USED)

    def _agree(self, found: list[int]) -> list[Bucket]:
        """Makes `used` the same on all ranks, from an agreement's result; returns the buckets with late gradients on any rank."""
        *agreed, stop = found[: -len(self._digest)]
        # The step raises the error, when no rank waits in a collective.
        self.settings_differ |= bytes(found[-len(self._digest) :]) != self._digest
        # Kept until the step, which may follow several micro-batches later.
        self.stop_agreed = max(self.stop_agreed, stop)
        for filling in filterfalse(_IS_WHOLE, self._fillings):
            for slot, is_used in zip(filling.bucket.slots, agreed[filling.first :]):
                if is_used and not slot.used:
                    slot.used = slot.used_elsewhere = True
        late = agreed[len(self._slots) :]
        return [bucket for bucket, is_late in zip(self._buckets, late) if is_late] if any(late) else []


def _hook_of(gradients: Gradients, index: int) -> Hook:
    """Returns a hook for the parameter of a slot, given the slot's index.

    The hook has no strong reference to the parameter or to the engine. Such a reference cycle would pass through torch's C++ list
    of hooks, which Python's garbage collector does not see, and the model would never be freed.
    """
    known = weakref.ref(gradients)

    def on_gradient(_parameter: torch.Tensor) -> None:
        gradients = known()
        if gradients is not None:
            gradients.take(gradients._slots[index])

    return on_gradient


def _last_hook_of(gradients: Gradients, index: int) -> Hook:
    """Returns a hook for the last parameter of a learned bucket; like `_hook_of`, without strong references."""
    known = weakref.ref(gradients)

    def on_last_gradient(_parameter: torch.Tensor) -> None:
        gradients = known()
        if gradients is not None:
            gradients.take_bucket(gradients._fillings[index])

    return on_last_gradient


def _clear(lists: Iterable[list]) -> None:
    # `clear` returns None, so `any` runs to the end.
    any(map(list.clear, lists))


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether the running backward will accumulate a gradient of the parameter."""
    if not parameter.requires_grad:
        # Frozen after the engine was built. Autograd skips such a parameter, even in a graph built before the freeze.
        return False
    # torch makes a view of the parameter to find its node. Without `look_only`, this read would gather a sharded parameter.
    with look_only():
        node = get_gradient_edge(parameter).node
    try:
        # No public function answers this before the backward reaches the parameter.
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch raises if `torch.autograd.grad` is to return this parameter's gradient, which is then not accumulated.
        return False


def _is_unreduced(gradient: torch.Tensor | None) -> bool:
    if isinstance(gradient, ShardedGradient):
        return gradient.pending is not None
    return gradient is not None
