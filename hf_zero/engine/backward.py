"""One backward pass: gradients fill buckets, full buckets are reduced, all are reduced at its end."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.sharded import ShardedGradient
from ..comm.ledger import Label
from ..comm.transport import Transport
from ..hooks import WeakHook, differentiable_tensors, dispatch_modes, hidden_from_modes, look_only, without_modes
from .gradient_store import GradientStore

_USED = Label(kind="agreement on used parameters", subject="this pass")


def never_asked() -> int:
    """Nobody looks for signals that ask this rank to stop."""
    return 0


class _Filling:
    """How far a bucket has come in the running pass.

    Attributes:
        place: of the bucket among all.
        awaited: how many of its slots have no gradient yet.
        collects: small gradients may be put without further questions; the pass reduces, and has not started the bucket.
    """

    __slots__ = ("awaited", "bucket", "collects", "place")

    def __init__(self, bucket: Bucket, place: int):
        self.bucket = bucket
        self.place = place
        self.awaited = 0
        self.collects = False


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
        stop_asked: returns the number of the signal that asks this rank to stop, 0 for none.
        stop_agreed: the number of a signal that some rank had at the end of its backward, the same on all ranks; 0 for none.
        hooked: the slots of all trained parameters, each with how far its bucket is filled.
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
        self._fillings = [_Filling(bucket, place) for place, bucket in enumerate(self._buckets)]
        self._filling_of = {filling.bucket: filling for filling in self._fillings}
        self.store = store
        self._transport = transport
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self.hooked = [(slot, self._filling_of[slot.bucket]) for slot in self._slots]
        self._next = 0
        self._held: set[ParameterSlot] = set()
        self._late: set[Bucket] = set()
        self._touched = False
        # Buckets of this pass that were started before all of their gradients had come; see `_start_passed_over`.
        self._passed_over: set[Bucket] = set()
        self.may_pass_over = True
        store.start_passed_over = WeakHook(self, Gradients._start_passed_over)
        self.reducing = True
        self.stop_asked = never_asked
        self.stop_agreed = 0
        self.ended = 0
        self._before_rest = before_rest
        self._after_pass = after_pass
        # True from the first gradient of a pass to its end.
        self._end_is_queued = False
        self._begin_pass()

    def install(self) -> list[RemovableHandle]:
        """Puts a hook on every parameter; the handles take them off again."""
        return [
            slot.parameter.register_post_accumulate_grad_hook(_hook_of(self, index))
            for index, slot in enumerate(self._slots)
        ]

    def watch(self, outputs: object) -> None:
        """Has the backward of a forward's outputs end the pass: hooks every tensor of them that takes gradients."""
        # On the root module's outputs, the hook queues autograd's callback on the outer graph task. Queued from a parameter's
        # hook it would run after each inner backward of reentrant checkpointing, too early; that is left for losses that bypass
        # the outputs, where an early end costs a further reduction and no gradient.
        for tensor in differentiable_tensors(outputs):
            tensor.register_hook(self._queue_end)

    def _queue_end(self, _gradient: torch.Tensor | None = None) -> None:
        """Queues the end of the running pass, once. Called inside a backward."""
        if not self._end_is_queued:
            self._end_is_queued = True
            Variable._execution_engine.queue_callback(self._end_pass)

    def refuse_unreduced(self) -> None:
        """Raises `RuntimeError` for a gradient that was accumulated without communication and not reduced since."""
        unreduced = [slot.name for slot in self._held if _is_unreduced(slot.parameter.grad)]
        if unreduced:
            raise RuntimeError(
                f"hf_zero: {len(unreduced)} gradients (first: {unreduced[0]!r}) were accumulated under no_sync and never "
                "reduced. Run the last backward before optimizer.step() outside no_sync (accelerator.accumulate does)."
            )

    def recover(self) -> None:
        """Drops the gradients of a backward that an exception has ended. Called outside any backward.

        Raises:
            RuntimeError: reductions were already under way, so the ranks may no longer agree.
        """
        if not self._end_is_queued and not self._touched:
            return
        self._end_is_queued = False
        if self._next > 0 and self._world_size > 1:
            raise RuntimeError(
                "hf_zero: the last backward ended with an error after some of its gradients had been sent to the other "
                "ranks, so the ranks no longer agree. End the run and resume it from a checkpoint."
            )
        self.store.finish_all()
        # Behind the wait: a reduction that runs still reads its buffer.
        self.store.discard_open()
        self.drop()
        self._begin_pass()

    def take_part_in_the_rest(self) -> None:
        """Finishes the pass on a rank whose forward or backward has failed: the others wait for its gradients.

        They get zeros in place of those that have not come. Collective with their backward.
        """
        self._end_is_queued = False
        if self.reducing and self._world_size > 1:
            self._finish_pass()

    def drop(self) -> None:
        """Forgets all gradients, reduced or not."""
        for slot in self._slots:
            slot.sharded_gradient.pending = None
        for bucket in self._buckets:
            bucket.drop_gradients()
        self._held.clear()

    def _begin_pass(self) -> None:
        for filling in self._fillings:
            filling.awaited, filling.collects = len(filling.bucket.slots), False
        self._next = 0
        self._late.clear()
        self._passed_over.clear()
        self._touched = False
        for slot in self._slots:
            slot.used = slot.used_elsewhere = slot.continues = False

    def take(self, slot: ParameterSlot) -> None:
        """Takes the gradient that autograd has accumulated in `slot.parameter.grad`: for each parameter, in each backward."""
        if dispatch_modes():
            with without_modes():
                return self.take(slot)
        gradient, bucket = slot.parameter.grad, slot.bucket
        # Before any return: also in a pass of undefined gradients alone, the other ranks wait in the agreement at its end.
        if not self._end_is_queued:
            self._queue_end()
        # A `ShardedGradient` with no pending sum is of an earlier pass: autograd has added nothing to that gradient since.
        if gradient is None or (isinstance(gradient, ShardedGradient) and gradient.pending is None):
            self._take_undefined(slot)
            return
        if torch.is_grad_enabled():
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
        if not bucket.memory.is_readable:
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
        if isinstance(gradient, ShardedGradient):
            gradient = cast(torch.Tensor, gradient.take_pending())
        filling = self._filling_of[bucket]
        # The bucket's reduction has begun: adding to its buffer now would change what other ranks receive.
        if filling.place < self._next:
            self._late.add(bucket)
            self.may_pass_over &= bucket not in self._passed_over
            self.store.put_late(slot, gradient)
            return
        # Counted once: reentrant checkpointing may bring several gradients of one parameter in a pass.
        if not slot.arrived:
            filling.awaited -= 1
        self.store.put(slot, gradient)
        if not filling.awaited:
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
        if not self._touched:
            self._touched = True
            # With `create_graph` none: `take` refuses each gradient, small ones, too.
            collects = not torch.is_grad_enabled()
            for filling in self._fillings:
                filling.collects = collects

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
        begun = [each for each in self._fillings if each.awaited < len(each.bucket.slots)]
        behind = [each for each in begun if self._next < each.place <= place]
        # Where a bucket behind this one has begun, gradients come in another order than buckets: the next one may still fill.
        # Buckets of other keys prove nothing: buckets of several keys fill side by side.
        if not behind or begun[-1].place > place or all(each.bucket.key != passed_over.key for each in behind):
            return False
        self._next += 1
        self._passed_over.add(passed_over)
        self._start(passed_over)
        self.start_full(up_to=place)
        return True

    def has_begun(self, bucket: Bucket) -> bool:
        """Whether a trained bucket has got gradients in this pass."""
        filling = self._filling_of.get(bucket)
        return filling is not None and filling.awaited < len(bucket.slots)

    def start_early(self, buckets: Iterable[Bucket]) -> None:
        """Starts buckets that get no gradients any more, full or not, and all buckets before them."""
        places = [self._filling_of[bucket].place for bucket in buckets if bucket in self._filling_of]
        if not (self.reducing and places):
            return
        if not self._touched and not any(_accumulates(slot.parameter) for slot in self._slots):
            # A penalty's `torch.autograd.grad` brings no gradients here, on no rank.
            return
        self._touch()
        while self._next <= max(places):
            bucket = self._buckets[self._next]
            if self._fillings[self._next].awaited:
                self._passed_over.add(bucket)
            # Counted first: a buffer that is waited for may start buckets, too.
            self._next += 1
            self._start(bucket)
        # Between groups of ranks too, where the next step of a reduction waits for the next reduction.
        self.store.start_last_steps(self._buckets[: max(places) + 1])
        self.start_full()

    def start_full(self, *, up_to: int | None = None) -> None:
        """Starts the next buckets that have all of their gradients, those before the place `up_to`; None for all."""
        last = len(self._buckets) if up_to is None else up_to
        while self._next < last and self._fillings[self._next].awaited == 0:
            # In bucket order, not in order of arrival: ranks match collectives by their order.
            self._start(self._buckets[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        if dispatch_modes():
            with without_modes():
                return self._start(bucket)
        # A small gradient is late from now on: put by its hook, the gradient would wait for a start that does not come.
        self._filling_of[bucket].collects = False
        self.store.start(bucket)

    @hidden_from_modes
    def _end_pass(self) -> None:
        self._end_is_queued = False
        # First: a rank that still gathers layers has not started its reductions.
        self._before_rest()
        if self._touched:
            self._finish_pass()
        # Now: one that fails in its last collectives has not ended.
        self.ended += 1
        self._after_pass()

    def _finish_pass(self) -> None:
        # Full or not: all ranks start all buckets of a pass, so that no rank waits alone in a collective.
        while self._next < len(self._buckets):
            self._start(self._buckets[self._next])
            self._next += 1
        # Started before the wait: the small message travels while this rank waits for the large ones.
        agreement = self._start_agreement()
        self.store.finish_all()
        # Reductions first, agreement second: late gradients are added to a finished sum, on all ranks alike.
        late = self._agree(agreement)
        for bucket in late:
            self.store.start_again(bucket)
        if late:
            self.store.finish_all()
        self.store.end_pass()
        with look_only():
            self.store.finish_slots(self._slots)
        # A slot that continues keeps the gradient that an earlier pass has reduced.
        for row in (slot.row for slot in self._slots if not slot.used):
            if row is not None and not row.slot.continues:
                # No rank used it: None, as under DDP, so that the optimizer leaves the parameter alone.
                row.tensor.grad = None
        self._held.clear()
        self._begin_pass()

    def _start_agreement(self) -> Callable[[], torch.Tensor]:
        """Tells the other ranks the parameters that this one used, its buckets with late gradients, and its wish to stop."""
        late = [bucket in self._late for bucket in self._buckets]
        # One message for all three: each message of its own would cost a latency at the end of every backward.
        local = bytearray([*[slot.used for slot in self._slots], *late, self.stop_asked()])
        return self._transport.start_agree_max(torch.frombuffer(local, dtype=torch.uint8), _USED)

    def _agree(self, agreement: Callable[[], torch.Tensor]) -> list[Bucket]:
        """Makes `used` the same on all ranks; returns the buckets with late gradients on any rank."""
        *agreed, stop = agreement().tolist()
        # Never back to 0: the next step, where ranks stop, may be several micro-batches away.
        self.stop_agreed = max(self.stop_agreed, stop)
        for slot, is_used in zip(self._slots, agreed):
            if is_used and not slot.used:
                slot.used = slot.used_elsewhere = True
        return [bucket for bucket, is_late in zip(self._buckets, agreed[len(self._slots) :]) if is_late]


def _hook_of(gradients: Gradients, index: int) -> Callable[[torch.Tensor], None]:
    """A hook on the parameter of a slot, by the slot's number.

    It holds nothing that leads back to the parameter or to the engine: Python does not find such a circle, which goes through
    torch's own list of hooks, and the model would never be freed.
    """
    known = weakref.ref(gradients)

    def on_gradient(_parameter: torch.Tensor) -> None:
        gradients = known()
        if gradients is not None:
            gradients.take(gradients.hooked[index][0])

    def on_small_gradient(_parameter: torch.Tensor) -> None:
        # Few calls, all here: most slots are small, and each comes here in each backward.
        gradients = known()
        if gradients is None:
            return
        slot, filling = gradients.hooked[index]
        gradient = slot.parameter.grad
        if (
            filling.collects
            and not slot.arrived
            and type(gradient) is torch.Tensor
            and not gradient.is_sparse
            and slot.bucket.memory.is_readable
        ):
            slot.used = True
            gradients.store.put_small(slot, gradient)
            filling.awaited -= 1
            if not filling.awaited:
                gradients.start_full()
        else:
            # Second gradients, pending sums, gradients that are refused.
            gradients.take(slot)

    return on_small_gradient if gradients.hooked[index][0].is_small else on_gradient


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


def _is_unreduced(gradient: torch.Tensor | None) -> bool:
    if isinstance(gradient, ShardedGradient):
        return gradient.pending is not None
    return gradient is not None
