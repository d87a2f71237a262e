"""Collectives of buckets: reductions of gradients, all-gathers of parameters, reads that wait for them, and their choice."""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, itemgetter
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from ..buckets.bucket import Bucket
from ..buckets.rows import KindsOf, Read, StateRow
from ..buckets.sharded import leaves
from ..comm.groups import Groups, RankGroup
from ..comm.ledger import Label
from ..comm.transport import DataParallelGroup, Handle, StepsInOrder
from ..config import ZeroConfig
from ..device import SideQueue, side_queue
from ..extras import extra
from ..hooks.guards import LOOKS, Guard, Guarded
from ..hooks.modes import hidden_from_modes
from ..hooks.tensors import set_all
from ..hooks.weak import engine_attached_to
from ..layout.blocks import BLOCK_NUMEL
from ..layout.buckets import USUAL_ALIGNMENT, Alignment
from ..optimizer.replicas import ReplicaCheck

# ---- Reductions of a bucket's gradients: reduce-scatter, all-reduce, or both over two groups ----


class Reduction:
    """Sums buckets over the ranks, in this class by an exact reduce-scatter.

    Subclasses may be lossy, and may keep state between passes. Checkpoints store this state.

    Args:
        of: name of the summed values in the ledger.
    """

    def __init__(self, of: str = "gradients"):
        self._kind = f"reduce-scatter {of}"

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """Starts the sum of `flat` (numel,) over the ranks, and writes this rank's shard of the sum to `out` (shard_numel,).

        `out` may be this rank's slice of `flat`. The contents of `flat` are undefined afterwards.
        """
        return bucket.group.transport.start_reduce_scatter(flat, out, bucket.label(self._kind))

    def end_pass(self) -> None:
        """Called on every rank when all reductions of a backward pass have ended."""

    @property
    def held_bytes(self) -> int:
        """Bytes of lasting state."""
        return 0

    @property
    def error(self) -> float | None:
        """Relative error of a recently sampled reduced gradient; None if the reduction is exact."""
        return None

    def rows(self) -> Iterator[StateRow]:
        """Yields copies of this rank's lasting state."""
        return iter(())

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces lasting state by a checkpoint's state. Arguments as in `fill_rows`.

        A reduction without state ignores the saved one. So rounding residuals of the saved run are lost, at most half a
        quantization step of its blocks.
        """


class ReplicatedReduction(Reduction):
    """An all-reduce, for buckets whose parameters every rank steps; `out` may be `flat` itself."""

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label, transport = bucket.label("all-reduce gradients"), bucket.group.transport
        handle = transport.start_all_reduce(flat, label)
        if out.data_ptr() == flat.data_ptr():
            return handle

        def complete() -> None:
            handle.finish()
            # After the wait, because `flat` is the all-reduce's buffer until then.
            out.copy_(flat)

        return Handle(label, transport.ledger, complete)


class HybridReduction(Reduction):
    """A reduction inside the shard group, followed by an all-reduce of each shard over its replicate group.

    Hybrid sharding: Zhang et al. 2022, "MiCS", arXiv 2205.00119. With R shard groups of S ranks, and n elements in a bucket, each
    rank sends 2(R-1)/R x n/S elements between the groups.

    Args:
        within: the reduction inside the shard group.
        order: starts all steps between ranks of a replicate group in the same order.
        queue: side queue in which the second sum waits for the first.
        of: name of the summed values in the ledger.
    """

    def __init__(
        self,
        within: Reduction,
        order: StepsInOrder,
        queue: SideQueue,
        of: str = "shards of gradients",
    ):
        self._within = within
        self._order = order
        self._queue = queue
        self._kind = f"all-reduce {of}"

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label, transport = bucket.label(self._kind), bucket.group.transport
        steps = self._order.begin(
            lambda: self._within.start(bucket, flat, out),
            lambda: transport.start_all_reduce(out, label),
            queue=self._queue,
        )
        return Handle(label, transport.ledger, steps.finish, steps.start_last)


# ---- All-gathers of a bucket's parameters: exact or cast ----

GATHER = "all-gather parameters"


def start_all_gather(
    bucket: Bucket, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
) -> Handle:
    """Starts filling `flat` with each rank's `own`, exactly; see `Transport.start_all_gather`."""
    if bucket.key.is_packed:
        # Backends do not support all dtypes: NCCL lacks int16, gloo lacks bool.
        flat, own = flat.view(torch.uint8), own.view(torch.uint8)
    return bucket.group.transport.start_all_gather(flat, own, label, among=among)


class Gather:
    """Fills a bucket's flat buffer with every rank's shard, in this class without quantization.

    Attributes:
        is_exact: shards are gathered in their own dtype. Otherwise each rank casts its shard to the dtype of forward and
            backward before the gather.
        takes_edits: edits of gathered values may be written to the shards, because the values are not rounded and no other copy
            of them is kept.
    """

    is_exact = False
    takes_edits = True

    def __init__(self, *, is_exact: bool = False):
        self.is_exact = is_exact

    def start(self, bucket: Bucket) -> Handle:
        """Starts filling `bucket.flat`, whose memory is allocated, from each rank's `bucket.memory.source`."""
        memory = bucket.memory
        return start_all_gather(bucket, memory.shown, memory.source, bucket.label(GATHER))

    @property
    def held_bytes(self) -> int:
        """Bytes kept from one gather for later gathers."""
        return 0

    def forget(self) -> None:
        """Called when the parameters are about to change."""


# ---- Secondary shards: after a forward, parameters stay sharded inside the node for the backward ----
#
# ZeRO++'s hierarchical partitioning, hpZ (Wang et al. 2023, arXiv 2306.10209). On nodes of n ranks, a rank keeps 1/n of the
# parameters from their forward to the step, so the gathers of the backward send nothing between nodes.


class ForwardGather(Gather):
    """Gathers from all ranks, and keeps this rank's part of the node's copy for a following backward.

    Args:
        whole: gathers from all ranks.
        node: the ranks of this node.

    Attributes:
        kept: this rank's part of each bucket gathered since the last step, (numel / node.size,).
    """

    takes_edits = False

    def __init__(self, whole: Gather, node: RankGroup):
        super().__init__()
        self._whole = whole
        self.node = node
        self.kept: dict[Bucket, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(part.nbytes for part in self.kept.values())

    def start(self, bucket: Bucket) -> Handle:
        handle = self._whole.start(bucket)
        # No backward follows an evaluation.
        if not torch.is_grad_enabled():
            return handle

        def complete() -> None:
            handle.finish()
            # Copied, because the gathered memory is freed after the forward.
            self.kept[bucket] = bucket.flat.view(self.node.size, -1)[self.node.index].clone()

        return Handle(bucket.label(GATHER), bucket.group.transport.ledger, complete)

    def forget(self) -> None:
        self.kept.clear()


class BackwardGather(Gather):
    """Gathers kept parts inside the node, and other parts from all ranks."""

    takes_edits = False

    def __init__(self, forward: ForwardGather):
        super().__init__()
        self._forward = forward

    def start(self, bucket: Bucket) -> Handle:
        # None, on all ranks, if no training forward has gathered the bucket since the last step.
        part = self._forward.kept.get(bucket)
        if part is None:
            return self._forward.start(bucket)
        label = bucket.label("all-gather parameters in the node")
        return start_all_gather(bucket, bucket.flat, part, label, among=self._forward.node)


# ---- The reductions and gathers that the config selects ----


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How gradients and parameters are sent between the ranks of each bucket's group.

    Attributes:
        reduction: reduces sharded gradients.
        steps: starts the steps of reductions between several shard groups; None with one group.
        gather: gathers parameters for forward and backward.
        forward: gathers for the forward, of parameters that are dropped between forward and backward.
        backward: gathers the same parameters for the backward.
        exact: gathers parameters to read, edit or save them.
        round_weights: rounds parameters in place, as the quantized blocks of `gather` do; None if `gather` does not quantize.
        quantises_gradients: `reduction` sends quantized blocks.
        align: alignment of shards, so that no shard ends inside a block.
    """

    reduction: Reduction
    gather: Gather
    forward: Gather
    backward: Gather
    exact: Gather
    steps: StepsInOrder | None = None
    round_weights: Callable[[torch.Tensor], None] | None = None
    quantises_gradients: bool = False
    align: Alignment = USUAL_ALIGNMENT

    def rounding_in(self, group: DataParallelGroup) -> Callable[[torch.Tensor], None] | None:
        """Returns `round_weights` if the ranks of the group receive parameters in quantized blocks; otherwise None."""
        # A group of one rank sends nothing, so rounding would lose precision for no benefit.
        return self.round_weights if group.groups.shard_size > 1 else None

    def adds_in_wider(self, group: DataParallelGroup) -> bool:
        """Whether gradients are summed over a group in the dtype of the result, if it is wider than the gradients' dtype."""
        is_summed = group.groups.shard_size > 1
        return is_summed and (self.quantises_gradients or group.transport.adds_in_wider)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of lasting memory by kind."""
        return {"gradient residuals": self.reduction.held_bytes, "secondary shards": self.forward.held_bytes}


def choose_wire(config: ZeroConfig, groups: Groups, device: torch.device) -> Wire:
    """Returns the reductions and gathers that `config.comm` selects. If one rank has all the state, nothing is quantized.

    Args:
        groups: the groups of the buckets with the most ranks.
        device: the training device.
    """
    exact = Gather(is_exact=True)
    in_passes = Gather() if config.gather_dtype == "bfloat16" else exact
    if groups.shard_size == 1:
        return Wire(reduction=ReplicatedReduction(), gather=exact, forward=in_passes, backward=in_passes, exact=exact)
    order, queue = StepsInOrder(), side_queue(device)
    quantises_weights, quantises_gradients = (kind != "none" for kind in (config.comm.weights, config.comm.gradients))
    if quantises_gradients:
        # In the same order as the gradients, so that on all ranks, a sample's steps between groups start at the same position.
        sample = _exact_reduction(groups, order, queue, of="a sample")
        reduction = extra("wire", "quantised_reduction")(config.comm, groups, order, sample)
    else:
        reduction = _exact_reduction(groups, order, queue)
    weights = extra("wire", "BlockFormat")() if quantises_weights else None
    gather = exact if weights is None else extra("wire", "QuantisedGather")(weights)
    forward = backward = in_passes if weights is None else gather
    if groups.node is not None:
        keeping = ForwardGather(forward, groups.node)
        forward, backward = keeping, BackwardGather(keeping)
    align = USUAL_ALIGNMENT
    if config.comm.quantises:
        # With several groups, shards of gradients are split again between the groups.
        parts = groups.replicate.size if quantises_gradients else 1
        align = Alignment(shard_numel=max(align.shard_numel, BLOCK_NUMEL) * parts)
    return Wire(
        reduction=reduction,
        steps=order if groups.replicate.size > 1 else None,
        gather=gather,
        forward=forward,
        backward=backward,
        exact=exact,
        round_weights=None if weights is None else weights.round_in_place,
        quantises_gradients=quantises_gradients,
        align=align,
    )


def _exact_reduction(groups: Groups, order: StepsInOrder, queue: SideQueue, **of: str) -> Reduction:
    """Returns an exact reduction, inside the shard group and, if there are several, between shard groups.

    Args:
        of: name of the summed values in the ledger, if they are not gradients.
    """
    within = Reduction(**of)
    return within if groups.replicate.size == 1 else HybridReduction(within, order, queue, **of)


# ---- All-gathers of parameters after the step, and reads of parameters that wait for them ----
#
# A gather writes into the flat buffer while the script continues, so a parameter read too early would have old values on some
# ranks. In flight, parameters get a `__torch_function__` subclass whose operations wait for the gather. C++ code, such as a
# custom kernel or `torch.func`, bypasses `__torch_function__`. Such code has usually just got the parameter from a module, so
# the `_parameters` dicts of these modules wait as well.

_FRAMES_TO_ZERO_GRAD = 8
"""Maximum number of stack frames searched for zero_grad, which calls through `parameters` and `_named_members`."""


class ArrivingValues(Guarded):
    """The class of parameters with a running all-gather: a reader waits for the bucket."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LOOKS:
            return torch.nn.Parameter.__torch_function__(func, types, args, kwargs)
        for tensor in leaves((args, kwargs)):
            _wait_for(tensor)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        # The wait restores the parameter's class, so the second call is Parameter.__deepcopy__. Without the wait, the copy would
        # have this class.
        _wait_for(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return self.__reduce_ex__(protocol)


_ARRIVING = Guard(ArrivingValues)


def _wait_for(value: Any) -> None:
    if not isinstance(value, ArrivingValues):
        return
    parameter = cast(nn.Parameter, value)
    engine = engine_attached_to(parameter)
    if engine is not None:
        engine.finish_parameters(parameter)
    # Even if the engine is gone or its all-gather has failed. Otherwise the next read would recurse without end.
    _ARRIVING.unguard((parameter,))


class _HandedOut(dict):
    """A module's `_parameters` while some are in flight. Each access to a parameter waits for its gather.

    Attributes:
        own: the module's own dict, which is restored afterwards.
    """

    own: dict

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        _wait_for(value)
        return value

    def items(self) -> Any:
        if not _only_gradients_are_read():
            for value in self.values():
                _wait_for(value)
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies get a plain dict, because a copy has no running gather.
        return dict, (dict(self),)


def _only_gradients_are_read() -> bool:
    """Whether `Module.zero_grad` is the reader. Trainer calls it right after the step, so a wait would end the overlap."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_TO_ZERO_GRAD):
        if frame is None:
            return False
        if frame.f_code is nn.Module.zero_grad.__code__:
            return True
        frame = frame.f_back
    return False


PARAMETERS_IN, _OWN = itemgetter("_parameters"), attrgetter("own")


def put_parameters(attributes: Iterable[dict[str, Any]], dicts: Iterable[dict[str, Any]]) -> None:
    """Sets the `_parameters` of modules whose attributes are given, in a loop in C."""
    any(map(dict.__setitem__, attributes, repeat("_parameters"), dicts))


class ParameterGather:
    """Starts the all-gathers of updated buckets, and finishes each at the first read of one of its parameters.

    Args:
        model: the module whose parameters are in `buckets`.
        buckets: in the order of gradients. They are gathered in the reverse order, in which forward needs them.
        gather: how the buckets are gathered.

    Attributes:
        replicas: is notified of each bucket that has arrived, before its parameters can be read.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket], gather: Gather):
        self._gather = gather
        self.replicas: ReplicaCheck | None = None
        self._in_flight: dict[Bucket, Handle] = {}
        self._bucket_of = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
        self._modules_of: dict[Bucket, list[nn.Module]] = {bucket: [] for bucket in self._bucket_of.values()}
        self._shared_of: dict[Bucket, list[nn.Module]] = {}
        for module in model.modules():
            held = (self._bucket_of.get(p) for p in module.parameters(recurse=False))
            for bucket in dict.fromkeys(each for each in held if each is not None):
                self._modules_of[bucket].append(module)
        # The attributes of modules whose parameters are all in one bucket; the other modules are in `_shared_of`.
        self._attributes_of: dict[Bucket, list[dict[str, Any]]] = {}
        buckets_of = Counter(module for modules in self._modules_of.values() for module in modules)
        for bucket, modules in self._modules_of.items():
            shared = [module for module in modules if buckets_of[module] > 1]
            self._attributes_of[bucket] = [each.__dict__ for each in modules if each not in shared]
            self._shared_of[bucket] = shared

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Starts gathering the buckets that the optimizer has just updated. Readers of their parameters wait."""
        for bucket in buckets:
            # An earlier gather of this bucket may still write to the same memory.
            self.finish(bucket)
            # In the queue of the copies from the tier, because the gather sends the shard that they write.
            with bucket.tier.h2d.aside() if bucket.tier.is_apart else nullcontext():
                self._in_flight[bucket] = self._gather.start(bucket)
        for started in buckets:
            _ARRIVING.guard(started.parameters)
            # Past `nn.Module.__getattr__`, and in loops in C, for speed.
            attributes, modules = self._attributes_of[started], self._shared_of[started]
            owns = list(map(PARAMETERS_IN, attributes))
            if {dict}.issuperset(map(type, owns)):
                handed_out = list(map(_HandedOut, owns))
                set_all(handed_out, "own", owns)
                put_parameters(attributes, handed_out)
            else:
                modules = self._modules_of[started]
            for module in modules:
                # Bypasses `nn.Module.__getattr__`, for speed. Stage 3's dicts handle reads themselves.
                own: Any = module.__dict__["_parameters"]
                if type(own) is dict:
                    module.__dict__["_parameters"] = guarded = _HandedOut(own)
                    guarded.own = own

    def finish_of(self, parameter: nn.Parameter) -> None:
        """Waits for the bucket of one parameter."""
        self.finish(self._bucket_of[parameter])

    @hidden_from_modes
    def finish(self, bucket: Bucket) -> None:
        """Waits for one bucket, and restores the dicts of modules whose parameters have all arrived."""
        handle = self._in_flight.pop(bucket, None)
        if handle is None:
            return
        # Wait before removing the guard. Otherwise a reader in another thread could see incomplete values.
        handle.finish()
        if self.replicas is not None:
            self.replicas.arrived(bucket)
        _ARRIVING.unguard(bucket.parameters)
        attributes, modules = self._attributes_of[bucket], self._shared_of[bucket]
        handed_out: list[Any] = list(map(PARAMETERS_IN, attributes))
        if {_HandedOut}.issuperset(map(type, handed_out)):
            owns = list(map(_OWN, handed_out))
            # As below.
            deque(map(dict.clear, owns), maxlen=0)
            deque(map(dict.update, owns, handed_out), maxlen=0)
            put_parameters(attributes, owns)
        else:
            modules = self._modules_of[bucket]
        for module in modules:
            guarded: Any = module.__dict__["_parameters"]
            if type(guarded) is _HandedOut and _ARRIVING.classes.isdisjoint(map(type, guarded.values())):
                own = guarded.own
                # Include entries that were set or deleted during the gather.
                own.clear()
                own.update(guarded)
                module.__dict__["_parameters"] = own

    def finish_all(self) -> None:
        for bucket in list(self._in_flight):
            self.finish(bucket)
