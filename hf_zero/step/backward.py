"""One backward pass: gradients fill buckets, full buckets are reduced, all are reduced at its end."""

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.sharded import GradientState, ShardedGradient
from ..comm.ledger import Label
from ..comm.transport import Transport
from ..hooks.guards import look_only
from ..hooks.modes import dispatch_modes, hidden_from_modes, without_modes
from ..hooks.tensors import differentiable_tensors, is_in_backward
from ..hooks.weak import WeakMethod
from ..optimizer.shared_settings import SharedSettings
from ..presence.arrivals import in_words
from .common_starts import CommonStarts
from .gradient_store import GradientStore

_USED = Label(kind="agreement on used parameters", subject="this pass")

_GRAD, _ARRIVED, _PARAMETER = attrgetter("grad"), attrgetter("arrived"), attrgetter("parameter")
_PLAIN = {torch.Tensor}
_LOST = 255
"""Sent in place of a signal's number by a rank whose backward has failed; signals have smaller numbers."""
_FIRST_PASSES, _MOST_PASSES = 2, 64
"""Passes that have to fill a bucket in the same way before one hook takes all of it: at first, and after many surprises."""


def never_asked() -> int:
    """Nobody looks for signals that ask this rank to stop."""
    return 0


# [Note: learned buckets]
# A hook in Python on each parameter costs the host more than the reduction that it leads to. Most models fill their buckets in
# the same way in each pass. So a bucket that the same parameter has completed in two passes is *learned*: from then on only the
# hook on that parameter runs Python, and takes the gradients of all. The hooks on the others are `list.append`, in C.
#
# The list tells which gradients have come, in their order, so nothing else is assumed. Gradients that the last hook does not take
# together (others are still to come, one is undefined or is a sum with an earlier one, the pass only accumulates) are taken one
# by one from the list, as hooks would have brought them: then, or at the end of the pass, or before the bucket is started. The
# bucket is then watched parameter by parameter again, for twice as many passes each time.


class _Filling:
    """How far a bucket has come in the running pass, and how its gradients are watched. See [Note: learned buckets].

    Attributes:
        place: of the bucket among all.
        awaited: how many of its slots have no gradient yet.
        arrived: of a learned bucket, the parameters whose gradients have come and are not taken, in their order.
        last: of a learned bucket, the slot whose hook takes all gradients; else None.
        is_whole: all gradients were taken together in this pass.
        completed_by: the slot that completed the bucket in this pass, with plain gradients alone.
        bytes_to_come: when the bucket was completed, the bytes of all buckets of which no gradient had come yet.
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
        *("first", "is_plain", "is_whole", "last", "place", "slot_of"),
    )

    def __init__(self, bucket: Bucket, place: int, first: int):
        self.bucket = bucket
        self.place = place
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
        """Whether gradients have come in this pass."""
        return self.awaited < len(self.bucket.slots) or bool(self.arrived)

    @property
    def buffer_bytes(self) -> int:
        """Returns the bytes of the bucket's whole gradient, in the dtype in which it is reduced."""
        bucket = self.bucket
        return bucket.layout.numel * bucket.precision.reduce.itemsize

    @property
    def is_alone(self) -> bool:
        """Whether no parameter has a hook of the script's, which would see other gradients than in earlier passes."""
        return {1}.issuperset(map(len, self._hook_dicts))

    def install(self, gradients: "Gradients") -> list[RemovableHandle]:
        """Puts a hook on every parameter; the handles take them off again."""
        handles = [
            slot.parameter.register_post_accumulate_grad_hook(_hook_of(gradients, self.first + slot.number))
            for slot in self.bucket.slots
        ]
        self._hook_dicts, self._hook_ids = [each.hooks_dict_ref() for each in handles], [each.id for each in handles]
        return handles

    def learn(self, gradients: "Gradients") -> None:
        """Leaves one hook in Python, on the parameter of `last`."""
        hooks: list[Any] = [self.arrived.append] * len(self.bucket.slots)
        hooks[cast(ParameterSlot, self.last).number] = _last_hook_of(gradients, self.place)
        self._replace_hooks(hooks)

    def watch_again(self, gradients: "Gradients") -> None:
        """Puts hooks in Python on all parameters again."""
        self.last = None
        self._replace_hooks([_hook_of(gradients, self.first + slot.number) for slot in self.bucket.slots])

    def _replace_hooks(self, new: Sequence[Any]) -> None:
        # In their places: torch would hook no parameter that is frozen now.
        for hooks, number, hook in zip(self._hook_dicts, self._hook_ids, new):
            # Not there any more once the handle has been removed.
            if number in hooks:
                hooks[number] = hook

    def is_learned_now(self) -> bool:
        """Called after each pass that reduces and in which the bucket is watched; returns whether that is no longer needed."""
        by = self.completed_by if self.is_plain else None
        self._in_a_row = self._in_a_row + 1 if by is not None and by is self._completed_before else int(by is not None)
        self._completed_before = by
        if self._in_a_row < self._wanted or not self.is_alone:
            return False
        self._wanted, self._in_a_row = min(2 * self._wanted, _MOST_PASSES), 0
        self.last = by
        return True


class Gradients:
    """Takes gradients from autograd's hooks and drives the store.

    Buckets are started in their fixed order on every rank, each as soon as it and all before it are full, so that ranks
    whose gradients come in different orders still meet in the same collectives. Whatever did not fill up is started at the
    end of backward, with zeros where nothing came. The ranks then agree on which parameters were used at all: one that no
    rank used keeps its gradient as it was, None included, as under DDP.

    Args:
        before_rest: called at the end of each backward, before reductions that have not started are.
        after_pass: called at the end of each backward, when all gradients are reduced.
        find_unused_parameters: see `ZeroEngine`.

    Attributes:
        store: keeps the gradients until the step.
        starts: counts the reductions that all ranks have started.
        transport: of the ranks that step together.
        stop_asked: returns the number of the signal that asks this rank to stop, 0 for none.
        stop_agreed: the number of a signal that some rank had at the end of its backward, the same on all ranks; 0 for none.
        settings_differ: some rank has had other settings of the step than another; see `SharedSettings`.
        reducing: False while micro-batches only accumulate.
        ended: backward passes that have come to their end.
        may_pass_over: buckets may be started before all of their gradients have come; see `_start_passed_over`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        store: GradientStore,
        transport: Transport,
        world_size: int,
        settings: SharedSettings,
        before_rest: Callable[[], None],
        after_pass: Callable[[], None],
        *,
        find_unused_parameters: bool,
    ):
        self._world_size = world_size
        # One rank alone does as a plain loop, which leaves such a parameter without a gradient.
        self._fills_undefined = world_size > 1 and not find_unused_parameters
        self._buckets = list(buckets)
        # Not the layout's index: that counts buckets of frozen parameters, too.
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._fillings: list[_Filling] = []
        for bucket in self._buckets:
            first = self._fillings[-1].first + len(self._fillings[-1].bucket.slots) if self._fillings else 0
            self._fillings.append(_Filling(bucket, len(self._fillings), first))
        self._filling_of = {filling.bucket: filling for filling in self._fillings}
        self.store = store
        self.transport = transport
        # Lists with parameters in hooks of parameters: circles that Python does not find, if a failed pass leaves them full.
        weakref.finalize(self, _clear, [filling.arrived for filling in self._fillings])
        self._next = 0
        self._held: set[ParameterSlot] = set()
        self._late: set[Bucket] = set()
        self._touched = False
        # Buckets of this pass that were started before all of their gradients had come; see `_start_passed_over`.
        self._passed_over: set[Bucket] = set()
        self.may_pass_over = True
        store.start_passed_over = WeakMethod(self, Gradients._start_passed_over)
        self.starts = store.starts = CommonStarts(len(self._buckets))
        self.starts.start_up_to = WeakMethod(self, Gradients.start_up_to)
        store.places = {bucket: place for place, bucket in enumerate(self._buckets)}
        self.reducing = True
        self.stop_asked = never_asked
        self.stop_agreed = 0
        self._settings = settings
        self._digest = b""
        self.settings_differ = False
        self.ended = 0
        self._before_rest = before_rest
        self._after_pass = after_pass
        # True from the first gradient of a pass to its end.
        self._end_is_queued = False
        # The callback in autograd's queue. It dies without a call when an exception ends the backward.
        self._end: weakref.ref[Any] | None = None
        # Why no step may follow a failed pass. The other ranks may still wait for this rank's part of it unless `_owed` is None;
        # else that is whether gradients had come.
        self._failure: RuntimeError | None = None
        self._owed: bool | None = None
        # Of a failed pass: whether another backward was to add to it, and the gradients that it has left.
        self._went_on = False
        self._left: list[tuple] = []
        # The hook on an output came first: no pass like this one needs the hooks of parameters to be noticed.
        self._is_announced = False
        self._begin_pass()

    def install(self) -> list[RemovableHandle]:
        """Puts a hook on every parameter; the handles take them off again."""
        return [handle for filling in self._fillings for handle in filling.install(self)]

    def _learn(self) -> None:
        """After a pass that reduces: leaves one hook in Python on buckets that fill in the same way each time."""
        for filling in self._fillings:
            if filling.last is None:
                takes_whole = self._is_announced and self.store.takes_whole(filling.bucket, filling.bytes_to_come)
                if takes_whole and filling.is_learned_now():
                    filling.learn(self)
            elif not filling.is_whole:
                filling.watch_again(self)

    def watch(self, outputs: object) -> None:
        """Has the backward of a forward's outputs end the pass: hooks every tensor of them that takes gradients."""
        # On the root module's outputs, the hook queues autograd's callback on the outer graph task. Queued from a parameter's
        # hook it would run after each inner backward of reentrant checkpointing, too early; that is left for losses that bypass
        # the outputs, where an early end costs a further reduction and no gradient.
        tensors = differentiable_tensors(outputs)
        for tensor in tensors:
            tensor.register_hook(self._queue_end)
        if not tensors:
            # Only hooks of parameters notice a backward of these outputs.
            for filling in self._fillings:
                if filling.last is not None:
                    filling.watch_again(self)

    def _queue_end(self, gradient: torch.Tensor | None = None) -> None:
        """Queues the end of the running pass, once. Called inside a backward, by an output's hook with a gradient."""
        if not self._end_is_queued:
            if self._failure is not None:
                self._end_failed_pass()
            self._end_is_queued = True
            self._is_announced = gradient is not None
            end = self._end_pass
            self._end = weakref.ref(end, self._lose_pass)
            Variable._execution_engine.queue_callback(end)

    def complete(self) -> None:
        """Ends a pass that only reached parameters without a hook in Python. Called outside any backward."""
        if not self._end_is_queued and any(map(_ARRIVED, self._fillings)):
            self._end_pass()

    def reduce_accumulated(self) -> None:
        """Reduces what earlier passes have only accumulated. Called outside any backward, on all ranks."""
        self.recover()
        self._touch()
        self._end_pass()

    def refuse_unreduced(self) -> None:
        """Raises `RuntimeError` for a gradient that was accumulated without communication and not reduced since."""
        unreduced = [slot.name for slot in self._held if _is_unreduced(slot.parameter.grad)]
        if unreduced:
            raise RuntimeError(
                f"hf_zero: {len(unreduced)} gradients (first: {unreduced[0]!r}) were accumulated under no_sync and never "
                "reduced. Run the last backward before optimizer.step() outside no_sync (accelerator.accumulate does)."
            )

    # [Note: a backward that an exception ends]
    # A script may catch the exception and go on. Plain PyTorch then keeps the gradients that have accumulated in `p.grad`.
    # Autograd drops the callback that would have ended the pass, so `_lose_pass` is called before the script goes on. With one
    # rank, it reduces what has come at once. If there is no memory for that, the next forward raises unless the script has zeroed
    # its gradients. Micro-batches that only accumulate have everything in `p.grad` anyway. Several ranks raise, as under DDP: a
    # failed rank has sent some gradients and lacks others. At its next forward, backward or step, it first takes part in the
    # reductions that other ranks wait for, and then all ranks raise.
    #
    # All ranks go on if all have failed before the first gradient, or if the pass was in `no_sync`. There DDP sends nothing, and
    # adds the gradients of the failed backward to the gradients of the other micro-batches. If the script has changed this rank's
    # gradients since then, for example by zero_grad, all ranks raise, because the sum over the ranks already contains them.

    def recover(self) -> None:
        """Ends a pass that has not come to its end, so that gradients can be read or a forward can begin.

        Called outside any backward. See [Note: a backward that an exception ends].

        Raises:
            RuntimeError: on all ranks, if a backward of one of several ranks has failed; and again at each later call.
        """
        if self._failure is not None:
            self._end_failed_pass()
        self.complete()

    def _marks_of_gradients(self) -> list[tuple]:
        """Returns a list that differs after the script has replaced, zeroed or changed a gradient."""
        with look_only():
            gradients = list(map(_GRAD, map(_PARAMETER, self._slots)))
            return [
                (id(g), g.state if isinstance(g, ShardedGradient) else getattr(g, "_version", 0)) for g in gradients
            ]

    def _show_lost(self) -> None:
        """Hangs stand-ins where gradients have been taken, so that `_are_zeroed` sees the script's zero_grad."""
        for filling in self._fillings:
            for slot in filling.bucket.slots:
                if slot.parameter.grad is None and (slot.used or filling.is_whole):
                    slot.parameter.grad = ShardedGradient(slot.name, slot.parameter)

    def _are_zeroed(self) -> bool:
        """Whether the script has zeroed all gradients."""
        with look_only():
            return all(map(_is_zeroed, map(_GRAD, map(_PARAMETER, self._slots))))

    def discard(self) -> None:
        """Forgets a failed pass on all ranks, with the gradients of all passes since the last step."""
        self._failure, self._owed = None, None
        self.complete()
        self.store.finish_all()
        # After the wait: a reduction that runs still reads its buffer.
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
            self._failure, self._owed = _refusal(), any(filling.has_begun for filling in self._fillings)
            self._went_on, self._left = self.store.goes_on, self._marks_of_gradients()
        else:
            # What `no_sync` micro-batches have left is reduced now, too.
            self._touched |= bool(self._held)
            try:
                with torch.no_grad():
                    self._end_pass(lost=True)
            except Exception as error:
                # Python prints and drops an exception that is raised here, so the next forward or step raises it.
                self._failure = _refusal(error)
                self._show_lost()

    @hidden_from_modes
    def _end_failed_pass(self) -> None:
        """Raises the error of a failed pass, after this rank has taken part in what the other ranks wait for."""
        if self._world_size == 1 and self._are_zeroed():
            self.discard()
            return
        if self._owed is not None:
            lost, self._owed = self._owed, None
            # Of this pass: the script may have entered or left `no_sync` since.
            reducing, self.reducing = self.reducing, True
            # A script that has zeroed or changed what had come by then means this rank's gradients alone.
            self.store.went_on = self._went_on and self._left == self._marks_of_gradients()
            # Also if nothing has come here: the other ranks may reduce.
            self._touch()
            self._before_rest()
            self._take_all_arrived()
            self._finish_pass(lost=lost)
            # Not inside the next backward, which may have gathered layers already.
            if not is_in_backward():
                self._after_pass()
            self.reducing = reducing
            self.store.went_on = None
        if self._failure is not None:
            raise RuntimeError(*self._failure.args)

    def take_part_in_the_rest(self) -> None:
        """Finishes the pass on a rank whose forward or backward has failed: the others wait for its gradients.

        They get zeros in place of those that have not come. Collective with their backward.
        """
        self._end_is_queued, self._end = False, None
        self._failure, self._owed = None, None
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
            bucket.drop_gradients()
        self._held.clear()

    def _begin_pass(self) -> None:
        for filling in self._fillings:
            if filling.is_whole:
                # Nothing was noted in its slots.
                filling.is_whole = False
            else:
                for slot in filling.bucket.slots:
                    slot.used = slot.used_elsewhere = slot.continues = False
            filling.awaited = len(filling.bucket.slots)
            filling.is_plain, filling.completed_by = True, None
            filling.arrived.clear()
        self._next = self.starts.started = 0
        self._late.clear()
        self._passed_over.clear()
        self._touched = self._is_announced = False

    def take(self, slot: ParameterSlot) -> None:
        """Takes the gradient that autograd has accumulated in `slot.parameter.grad`. Called by its hook."""
        if dispatch_modes():
            with without_modes():
                return self.take(slot)
        # Before any return: also in a pass of undefined gradients alone, the other ranks wait in the agreement at its end.
        if not self._end_is_queued:
            self._queue_end()
        self._take(slot, has_graph=torch.is_grad_enabled(), is_readable=slot.bucket.memory.is_readable)

    def take_bucket(self, filling: _Filling) -> None:
        """Takes all gradients of a learned bucket together. Called by the hook on the parameter whose gradient comes last."""
        if dispatch_modes():
            with without_modes():
                return self.take_bucket(filling)
        if not self._end_is_queued:
            self._queue_end()
        bucket = filling.bucket
        filling.arrived.append(cast(ParameterSlot, filling.last).parameter)
        if self._may_take_whole(filling):
            with look_only():
                gradients = list(map(_GRAD, bucket.parameters))
            self._touch()
            if _PLAIN.issuperset(map(type, gradients)) and self.store.put_whole(bucket, gradients):
                # Freed before the reduction starts, which may need as much memory.
                del gradients
                filling.is_whole, filling.awaited = True, 0
                filling.arrived.clear()
                self.start_full()
                return
        self._take_arrived(filling, has_graph=torch.is_grad_enabled(), is_readable=bucket.memory.is_readable)

    def has_used_all(self, bucket: Bucket) -> bool:
        """Whether this rank has used, in this pass, each parameter that it has a row of in the bucket."""
        # The slots of a bucket that is taken as a whole are not noted one by one.
        return self._filling_of[bucket].is_whole or all(row.slot.used for row in bucket.rows)

    def _may_take_whole(self, filling: _Filling) -> bool:
        count = len(filling.bucket.slots)
        return (
            self.reducing
            and len(filling.arrived) == count == filling.awaited
            and filling.place >= self._next
            and filling.bucket.memory.is_readable
            and not torch.is_grad_enabled()
            and filling.is_alone
        )

    def _take_arrived(self, filling: _Filling, *, has_graph: bool | None = None, is_readable: bool = True) -> None:
        """Takes what has come to a learned bucket and was not taken, as hooks on the parameters would have."""
        if filling.is_whole and filling.arrived:
            # Further gradients came after all were taken together: from now on the slots differ.
            filling.is_whole = False
            for slot in filling.bucket.slots:
                slot.used = True
            self.store.note_slots(filling.bucket)
        arrived = list(dict.fromkeys(filling.arrived))
        # First: an error leaves nothing to be taken twice.
        filling.arrived.clear()
        for parameter in arrived:
            self._take(filling.slot_of[cast(nn.Parameter, parameter)], has_graph=has_graph, is_readable=is_readable)

    def _take_all_arrived(self) -> None:
        for filling in self._fillings:
            if filling.arrived:
                self._take_arrived(filling)

    def _take(self, slot: ParameterSlot, *, has_graph: bool | None, is_readable: bool) -> None:
        """Takes a gradient.

        Args:
            has_graph: the backward was called with create_graph; None if that is to be seen by the gradient.
            is_readable: the parameters of its layer are whole, or were so when the gradient was computed.
        """
        gradient, bucket = slot.parameter.grad, slot.bucket
        # A `ShardedGradient` with no pending sum is of an earlier pass: autograd has added nothing to that gradient since.
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
            raise RuntimeError(
                f"hf_zero: {slot.name!r} has a sparse gradient, which has no place in a flat bucket. Build its embedding "
                "with sparse=False."
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
        # The bucket's reduction has begun: adding to its buffer now would change what other ranks receive.
        if filling.place < self._next:
            self._late.add(bucket)
            filling.is_plain = False
            self.may_pass_over &= bucket not in self._passed_over
            self.store.put_late(slot, gradient)
            return
        # Counted once: reentrant checkpointing may bring several gradients of one parameter in a pass.
        if not slot.arrived:
            filling.awaited -= 1
        self.store.put(slot, gradient)
        if not filling.awaited:
            filling.completed_by = slot
            filling.bytes_to_come = sum(each.buffer_bytes for each in self._fillings if not each.has_begun)
            self.start_full()

    def _take_undefined(self, slot: ParameterSlot) -> None:
        """Handles a parameter that autograd has passed without a gradient.

        As under DDP, the parameter counts as used, with zeros; with `find_unused_parameters`, as unused in this pass.
        """
        gradient = slot.parameter.grad
        # The gradient of a spent one was dropped; see `ShardedGradient`.
        if not self.reducing or (isinstance(gradient, ShardedGradient) and gradient.is_spent):
            return
        # The other ranks may have a gradient for the parameter, and reduce.
        self._touch()
        if not self._fills_undefined:
            return
        slot.used = True
        filling = self._filling_of[slot.bucket]
        filling.is_plain = False
        # The start of the bucket's reduction has put zeros for this slot already, if no gradient had arrived.
        if slot.arrived or filling.place < self._next:
            return
        filling.awaited -= 1
        # Expanded from one element: the zeros take no memory beside the buffer.
        zero = torch.zeros((), dtype=slot.parameter.dtype, device=slot.bucket.device)
        self.store.put(slot, zero.expand(slot.parameter.shape))
        if not filling.awaited:
            self.start_full()

    def _touch(self) -> None:
        """Notes that this pass reduces gradients."""
        self._touched = True

    def _start_passed_over(self, bucket: Bucket) -> bool:
        """Starts the next bucket, not full, if gradients have gone past that one to `bucket`. Returns whether it started.

        A parameter that is not used (a pooler) would else hold up all buckets, and their buffers, to the end of backward. Those
        of one kind fill one after the other, so that one which is not full when another behind it has begun will not be. What
        comes after all is late, and reduced once more; a model in which that happens is one whose gradients come in another
        order than its buckets, and there nothing is passed over again.
        """
        place = self._filling_of[bucket].place
        if not self.may_pass_over or self._next >= place:
            return False
        passed_over = self._buckets[self._next]
        begun = [each for each in self._fillings if each.has_begun]
        behind = [each for each in begun if self._next < each.place <= place]
        # Where a bucket behind this one has begun, gradients come in another order than buckets: the next one may still fill.
        # Buckets of other keys prove nothing: buckets of several keys fill side by side.
        if not behind or begun[-1].place > place or all(each.bucket.key != passed_over.key for each in behind):
            return False
        before = self._next
        self._take_arrived(self._fillings[before])
        # What had come has not completed the bucket.
        if self._next == before:
            self._start_next()
        self.start_full(up_to=place)
        return True

    def start_up_to(self, number: int) -> None:
        """Starts the first `number` buckets, full or not, up to their last steps. See `CommonStarts`."""
        if self.reducing:
            # Ranks with another part of a split model may have more buckets.
            number = min(number, len(self._buckets))
            if self._next < number:
                self._start_first(number)
            self.store.start_last_steps(number)

    def _start_first(self, number: int) -> None:
        if not self._touched and not self._accumulates():
            # A penalty's `torch.autograd.grad` brings no gradients here, on no rank.
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
        # Counted first: a buffer that is waited for may start buckets, too.
        self._next += 1
        self.store.may_ask = False
        try:
            if is_full:
                self.store.start(bucket)
            else:
                self._passed_over.add(bucket)
                self.store.start_unfilled(bucket)
        except Exception:
            # The end of the failed pass starts it once more: the other ranks wait for it.
            self._next -= 1
            raise
        finally:
            self.store.may_ask = True
        self.starts.started = self._next

    def _accumulates(self) -> bool:
        """Whether the backward that runs will accumulate gradients."""
        if torch.is_grad_enabled() and Variable._execution_engine.is_checkpoint_valid():
            # Reentrant checkpointing recomputes a layer: its gradients come from a graph that is not there yet. torch allows
            # that only in a backward that accumulates.
            return any(slot.parameter.requires_grad for slot in self._slots)
        return any(_accumulates(slot.parameter) for slot in self._slots)

    def start_full(self, *, up_to: int | None = None) -> None:
        """Starts the next buckets that have all of their gradients, those before the place `up_to`; None for all."""
        buckets, fillings = self._buckets, self._fillings
        last = len(buckets) if up_to is None else up_to
        # In bucket order, not in order of arrival: ranks match collectives by their order.
        while (place := self._next) < last and not fillings[place].awaited:
            self.store.start(buckets[place])
            self._next = self.starts.started = place + 1

    @hidden_from_modes
    def _end_pass(self, *, lost: bool | None = None) -> None:
        """Ends the running pass. `lost`: as of `_finish_pass`."""
        # Without the reference, nobody takes the end of autograd's callback for a failure.
        self._end_is_queued, self._end = False, None
        try:
            # First: a rank that still gathers layers has not started its reductions.
            self._before_rest()
            self._take_all_arrived()
            if self._touched:
                self._finish_pass(lost=lost)
        except Exception:
            # The script may catch it. Then no step may follow: gradients are missing.
            self._failure = self._failure or _refusal()
            if self._world_size == 1:
                self._show_lost()
            raise
        # Now: one that fails in its last collectives has not ended.
        self.ended += 1
        self._after_pass()

    def _finish_pass(self, *, lost: bool | None = None) -> None:
        """Reduces all gradients of a pass.

        Args:
            lost: None for a pass that has come to its end. Else an exception has ended its backward on this rank: whether
                gradients had come before.
        """
        fillings = self._fillings
        if lost is not None and self._world_size == 1:
            # Buckets without gradients allocate nothing: the failure may have been that there is no memory left.
            fillings = [each for each in fillings if each.has_begun or not self._held.isdisjoint(each.bucket.slots)]
            for filling in fillings:
                if filling.place >= self._next:
                    self._next = filling.place + 1
                    self.store.start(filling.bucket)
            self._next = len(self._buckets)
        # Full or not: all ranks start all buckets of a pass, so that no rank waits alone in a collective.
        while self._next < len(self._buckets):
            self.store.start(self._buckets[self._next])
            self._next += 1
        if self._passed_over:
            self._take_what_waits()
        # Started before the wait: the small message travels while this rank waits for the large ones.
        agreement = self._start_agreement(self.stop_asked() if lost is None or self._world_size == 1 else _LOST)
        self.store.finish_all()
        # Reductions first, agreement second: late gradients are added to a finished sum, on all ranks alike.
        late = self._agree(agreement)
        for bucket in late:
            self.store.start_again(bucket)
        if late:
            self.store.finish_all()
        self.store.end_pass()
        slots = [slot for filling in fillings if not filling.is_whole for slot in filling.bucket.slots]
        if slots:
            with look_only():
                self.store.finish_slots(slots)
        # A slot that continues keeps the gradient that an earlier pass has reduced.
        for row in (slot.row for slot in slots if not slot.used):
            if row is not None and not row.slot.continues:
                # No rank used it: None, as under DDP, so that the optimizer leaves the parameter alone.
                row.tensor.grad = None
        self._held.clear()
        self._learn()
        self._begin_pass()
        if self.stop_agreed == _LOST:
            self._judge_loss(lost)
        elif self._world_size > 1:
            self.starts.learn(self.transport)

    def _take_what_waits(self) -> None:
        """Takes sums of `no_sync` micro-batches that `start_unfilled` left in `p.grad` and to which this pass added nothing."""
        # Emptied first: the sums are late by design, so they do not show that gradients come in another order than the buckets.
        passed_over, self._passed_over = self._passed_over, set()
        for slot in (slot for bucket in passed_over for slot in bucket.slots):
            if not slot.used and _is_unreduced(slot.parameter.grad):
                self._take(slot, has_graph=None, is_readable=True)

    def _judge_loss(self, lost: bool | None) -> None:
        """Raises on all ranks if the backward of one has failed.

        Not if all have failed before the first gradient, nor in `no_sync`, where each rank keeps what has come, as under DDP.

        Args:
            lost: as of `_finish_pass`.
        """
        # A signal on another rank is asked for again in the next pass.
        self.stop_agreed = 0
        said = dist.get_rank(), lost, self.store.goes_on
        everyone = self.transport.exchange(said, "exchange after a failed backward")
        if all(theirs is False for _, theirs, _ in everyone) or all(goes_on for _, _, goes_on in everyone):
            self._failure = None
        else:
            self._failure = _refusal(ranks=[rank for rank, theirs, _ in everyone if theirs is not None])
            raise RuntimeError(*self._failure.args)

    def _start_agreement(self, stop: int) -> Callable[[], torch.Tensor]:
        """Sends the parameters that this rank used, its buckets with late gradients, `stop`, and its settings."""
        used = [
            b"\1" * len(filling.bucket.slots)
            if filling.is_whole
            else bytes([slot.used for slot in filling.bucket.slots])
            for filling in self._fillings
        ]
        late = bytes([bucket in self._late for bucket in self._buckets]) if self._late else bytes(len(self._buckets))
        self._digest = self._settings.digest()
        # One message for all of these: each message of its own would cost a latency at the end of every backward.
        local = bytearray(b"".join([*used, late, bytes([stop]), self._digest]))
        return self.transport.start_agree_max(torch.frombuffer(local, dtype=torch.uint8), _USED)

    def _agree(self, agreement: Callable[[], torch.Tensor]) -> list[Bucket]:
        """Makes `used` the same on all ranks; returns the buckets with late gradients on any rank."""
        found = agreement().tolist()
        *agreed, stop = found[: -len(self._digest)]
        # Raised at the step: no rank is left in a collective then.
        self.settings_differ |= bytes(found[-len(self._digest) :]) != self._digest
        # Kept until the step, which may be several micro-batches away.
        self.stop_agreed = max(self.stop_agreed, stop)
        for filling in self._fillings:
            if filling.is_whole:
                continue
            for slot, is_used in zip(filling.bucket.slots, agreed[filling.first :]):
                if is_used and not slot.used:
                    slot.used = slot.used_elsewhere = True
        late = agreed[len(self._slots) :]
        return [bucket for bucket, is_late in zip(self._buckets, late) if is_late] if any(late) else []


def _hook_of(gradients: Gradients, index: int) -> Callable[[torch.Tensor], None]:
    """A hook on the parameter of a slot, by the slot's number.

    It holds nothing that leads back to the parameter or to the engine: Python does not find such a circle, which goes through
    torch's own list of hooks, and the model would never be freed.
    """
    known = weakref.ref(gradients)

    def on_gradient(_parameter: torch.Tensor) -> None:
        gradients = known()
        if gradients is not None:
            gradients.take(gradients._slots[index])

    return on_gradient


def _last_hook_of(gradients: Gradients, place: int) -> Callable[[torch.Tensor], None]:
    """The hook on the parameter that completes a learned bucket; it holds no more than those of `_hook_of`."""
    known = weakref.ref(gradients)

    def on_last_gradient(_parameter: torch.Tensor) -> None:
        gradients = known()
        if gradients is not None:
            gradients.take_bucket(gradients._fillings[place])

    return on_last_gradient


def _clear(lists: Iterable[list]) -> None:
    for each in lists:
        each.clear()


def _refusal(why: object = None, *, ranks: Sequence[int] = ()) -> RuntimeError:
    where = f" on {in_words(ranks)}" if ranks else ""
    reason = (
        "so the ranks no longer agree"
        if why is None
        else f"and these could not be reduced: {str(why) or type(why).__name__}"
    )
    return RuntimeError(
        f"hf_zero: the last backward ended with an error{where} after some of its gradients had been taken, {reason}. End the "
        "run and resume it from a checkpoint."
    )


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs will accumulate a gradient of the parameter."""
    if not parameter.requires_grad:
        # Frozen since the engine was built. Autograd skips such a parameter, also in a graph from before.
        return False
    # torch takes a view of the parameter to find its node: of a sharded parameter that would be a read, which gathers.
    with look_only():
        node = get_gradient_edge(parameter).node
    try:
        # No public way tells that of a backward that has not come to a parameter yet.
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # The answer where `torch.autograd.grad` returns the gradient of this parameter, which accumulates none.
        return False


def _is_zeroed(gradient: torch.Tensor | None) -> bool:
    if isinstance(gradient, ShardedGradient):
        return gradient.state is GradientState.ZEROED and gradient.pending is None
    return gradient is None or not gradient.any()


def _is_unreduced(gradient: torch.Tensor | None) -> bool:
    if isinstance(gradient, ShardedGradient):
        return gradient.pending is not None
    return gradient is not None
