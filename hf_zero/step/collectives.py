"""Collectives of buckets: reductions of gradients, all-gathers of parameters and reads that wait for them, and their choice."""

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
    """Sums buckets over the ranks: here by a reduce-scatter of the gradients as they are.

    Other ways may lose something, and keep state between passes, which goes into checkpoints.

    Args:
        of: what is summed, for the ledger.
    """

    def __init__(self, of: str = "gradients"):
        self._kind = f"reduce-scatter {of}"

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """Starts the sum of `flat` (numel,) over the ranks; this rank's (shard_numel,) of it land in `out`.

        `out` may be this rank's part of `flat`, whose contents are undefined afterwards.
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
        """Relative error of a reduced gradient that was sampled lately; None where nothing is lost."""
        return None

    def rows(self) -> Iterator[StateRow]:
        """This rank's lasting state, copied."""
        return iter(())

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces lasting state by a checkpoint's; the arguments are `fill_rows`'s.

        Where nothing is kept, what another run has not sent stays unsent: at most half a step of its blocks.
        """


class ReplicatedReduction(Reduction):
    """An all-reduce, where every rank steps all parameters; `out` may be `flat` itself."""

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label, transport = bucket.label("all-reduce gradients"), bucket.group.transport
        handle = transport.start_all_reduce(flat, label)
        if out.data_ptr() == flat.data_ptr():
            return handle

        def complete() -> None:
            handle.finish()
            # Behind the wait: until then `flat` is being summed.
            out.copy_(flat)

        return Handle(label, transport.ledger, complete)


class HybridReduction(Reduction):
    """A sum inside the shard group, and then of each shard over its replicate group.

    Hybrid sharding: Zhang et al. 2022, "MiCS", arXiv 2205.00119. Of a bucket with n elements in shard groups of S ranks, of
    which there are R, 2(R-1)/R x n/S elements go between the groups.

    Args:
        within: the sum inside the shard group.
        order: that all steps between ranks of a replicate group are started in.
        queue: in which the second sum waits for the first.
        of: what is summed, for the ledger.
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
    """Starts filling `flat` with each rank's `own`, without a loss; see `Transport.start_all_gather`."""
    if bucket.key.is_packed:
        # Backends have few dtypes: NCCL no int16, gloo no bool.
        flat, own = flat.view(torch.uint8), own.view(torch.uint8)
    return bucket.group.transport.start_all_gather(flat, own, label, among=among)


class Gather:
    """Fills a bucket's flat buffer with every rank's shard: here with parameters as the ranks have them.

    Attributes:
        is_exact: shards of another dtype than that of forward and backward are gathered as they are; else each rank casts its
            own to that.
        takes_edits: what is gathered is the shards' values, and no copy of it is kept: an edit of it may go into the shards.
    """

    is_exact = False
    takes_edits = True

    def __init__(self, *, is_exact: bool = False):
        self.is_exact = is_exact

    def start(self, bucket: Bucket) -> Handle:
        """Starts filling `bucket.flat`, which has memory, from the `source` of each rank's."""
        memory = bucket.memory
        return start_all_gather(bucket, memory.shown, memory.source, bucket.label(GATHER))

    @property
    def held_bytes(self) -> int:
        """Bytes kept from one gather for others."""
        return 0

    def forget(self) -> None:
        """Called when the parameters are about to change."""


# ---- Secondary shards: parameters that a forward gathered stay sharded inside the node for its backward ----
#
# ZeRO++'s hierarchical partitioning, hpZ (Wang et al. 2023, arXiv 2306.10209). On nodes of n ranks, a rank keeps 1/n of the
# parameters from their forward to the step, and the gathers of the backward send nothing between nodes.


class ForwardGather(Gather):
    """Gathers from all ranks, and keeps this rank's part of the node's copy for a backward that may follow.

    Args:
        whole: gathers from all ranks.
        node: this rank's node.

    Attributes:
        kept: of each bucket gathered since the last step, (numel / node.size,).
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
        # An evaluation has no backward that would need the kept part.
        if not torch.is_grad_enabled():
            return handle

        def complete() -> None:
            handle.finish()
            # A copy: the gathered memory goes when the forward has ended.
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
        # None on all ranks alike, where no training forward has gathered the bucket since the last step.
        part = self._forward.kept.get(bucket)
        if part is None:
            return self._forward.start(bucket)
        label = bucket.label("all-gather parameters in the node")
        return start_all_gather(bucket, bucket.flat, part, label, among=self._forward.node)


# ---- What travels between the ranks and in which form, as the config asks for it ----


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How gradients and parameters travel, each bucket's between the ranks of its group.

    Attributes:
        reduction: of gradients, where they are sharded.
        steps: starts the steps of reductions between several shard groups.
        gather: of the parameters that forward and backward compute with.
        forward, backward: the same for parameters that are dropped in between.
        exact: of parameters that are looked at, edited or saved.
        round_weights: rounds parameters, in place, as the blocks do in which `gather` sends; None where it sends what there is.
        quantises_gradients: `reduction` sends blocks.
        align: of shards, so that none ends inside a block.
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
        """`round_weights` where parameters come in blocks to each rank of a group; None where they come as they are."""
        # Within a group of one rank nothing travels: rounding would lose digits for nothing.
        return self.round_weights if group.groups.shard_size > 1 else None

    def adds_in_wider(self, group: DataParallelGroup) -> bool:
        """Whether gradients are summed over a group in the dtype of the result, where that is wider than theirs."""
        is_summed = group.groups.shard_size > 1
        return is_summed and (self.quantises_gradients or group.transport.adds_in_wider)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of lasting memory by kind."""
        return {"gradient residuals": self.reduction.held_bytes, "secondary shards": self.forward.held_bytes}


def choose_wire(config: ZeroConfig, groups: Groups, device: torch.device) -> Wire:
    """The reductions and gathers that `config.comm` asks for. Where one rank has all the state, nothing is quantised.

    Args:
        groups: of the most ranks that a bucket is shared between.
        device: that computes.
    """
    exact = Gather(is_exact=True)
    in_passes = Gather() if config.gather_dtype == "bfloat16" else exact
    if groups.shard_size == 1:
        return Wire(reduction=ReplicatedReduction(), gather=exact, forward=in_passes, backward=in_passes, exact=exact)
    order, queue = StepsInOrder(), side_queue(device)
    quantises_weights, quantises_gradients = (kind != "none" for kind in (config.comm.weights, config.comm.gradients))
    if quantises_gradients:
        # In one order with the gradients: on all ranks, a sample's step between groups has the same place among their steps.
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
        # Shards of gradients are cut once more between several groups.
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
    """Without loss: inside the shard group, and between several of them.

    Args:
        of: what is summed, where it is not the gradients.
    """
    within = Reduction(**of)
    return within if groups.replicate.size == 1 else HybridReduction(within, order, queue, **of)


# ---- All-gathers of parameters after the step, and reads of parameters that wait for them ----
#
# A gather writes into the flat buffer while the script goes on, so a parameter read too early would be old on some ranks. While
# its bucket is in flight, a parameter is of a class of which torch asks before it runs an operation on it. Code in C++ that is
# handed a parameter asks nobody: a kernel of the script's own, or `torch.func`. Most often such code has just had it from a
# module. So the modules that hold parameters in flight have dicts as their `_parameters` that wait when they hand one out.

_FRAMES_TO_ZERO_GRAD = 8
"""zero_grad, parameters, named_parameters, _named_members and its callable lie between; some are generators."""


class ArrivingValues(Guarded):
    """Guards a parameter that an all-gather is writing to: a reader waits for its bucket."""

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
        # The wait gives the parameter its own class again, so that the second call is Parameter's.
        # Parameter's own would make a copy of this class.
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
    # Also where the engine has gone, or its all-gather has failed: to ask once more would not end.
    _ARRIVING.unguard((parameter,))


class _HandedOut(dict):
    """A module's `_parameters` while some are in flight: they are waited for when they are handed out.

    Attributes:
        own: the module's own dict, which takes this one's place again.
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
        # A plain dict: no gather is under way in a copy.
        return dict, (dict(self),)


def _only_gradients_are_read() -> bool:
    """Whether `Module.zero_grad` is the reader: Trainer calls it right after the step, and a wait would end the overlap."""
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
        model: the module whose parameters lie in `buckets`.
        buckets: in gradient order; gathered in the reverse, the order in which forward needs them.
        gather: how.

    Attributes:
        replicas: is told of each bucket that has arrived, before its parameters can be read.
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
            # A former gather of this bucket still writes to the memory that this one would write to.
            self.finish(bucket)
            # Behind the copies up from a tier, in their queue: the gather sends the shard that they write.
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
                # Past `nn.Module.__getattr__`, for speed. Dicts that stage 3 has put there look after reads themselves.
                own: Any = module.__dict__["_parameters"]
                if type(own) is dict:
                    module.__dict__["_parameters"] = guarded = _HandedOut(own)
                    guarded.own = own

    def finish_of(self, parameter: nn.Parameter) -> None:
        """Waits for the bucket of one parameter."""
        self.finish(self._bucket_of[parameter])

    @hidden_from_modes
    def finish(self, bucket: Bucket) -> None:
        """Waits for one bucket, and leaves modules whose parameters are all there with their own dicts."""
        handle = self._in_flight.pop(bucket, None)
        if handle is None:
            return
        # Wait first, unguard second: a reader between the two would see half of the values.
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
                # With what has been set and deleted meanwhile.
                own.clear()
                own.update(guarded)
                module.__dict__["_parameters"] = own

    def finish_all(self) -> None:
        for bucket in list(self._in_flight):
            self.finish(bucket)
