"""All-gathers of parameters after the step, and reads of parameters that wait for them."""

import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import repeat
from operator import attrgetter, itemgetter
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from ..buckets.bucket import Bucket
from ..comm.transport import Handle
from ..hooks.guards import LOOKS, Guard, Guarded
from ..hooks.modes import hidden_from_modes
from ..hooks.tensors import leaves, set_all
from ..hooks.weak import engine_attached_to
from ..optimizer.replicas import ReplicaCheck
from .gathers import Gather

# A gather writes into the flat buffer while the script continues, so a parameter read too early would have old values on some
# ranks. In flight, parameters get a `__torch_function__` subclass whose operations wait for the gather. C++ code, such as a
# custom kernel or `torch.func`, bypasses `__torch_function__`. Such code has usually just got the parameter from a module, so
# the `_parameters` dicts of these modules wait as well.

_FRAMES_TO_ZERO_GRAD = 8
"""Maximum number of stack frames searched for zero_grad, which calls through `parameters` and `_named_members`."""


class GatheringParameter(Guarded):
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


_ARRIVING = Guard(GatheringParameter)


def _wait_for(value: Any) -> None:
    if not isinstance(value, GatheringParameter):
        return
    parameter = cast(nn.Parameter, value)
    engine = engine_attached_to(parameter)
    if engine is not None:
        engine.finish_parameters(parameter)
    # Even if the engine is gone or its all-gather has failed. Otherwise the next read would recurse without end.
    _ARRIVING.unguard((parameter,))


class _WaitingParameters(dict):
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
            with bucket.tier.h2d.in_parallel() if bucket.tier.is_offloaded else nullcontext():
                self._in_flight[bucket] = self._gather.start(bucket)
        for started in buckets:
            _ARRIVING.guard(started.parameters)
            # Past `nn.Module.__getattr__`, and in loops in C, for speed.
            attributes, modules = self._attributes_of[started], self._shared_of[started]
            owns = list(map(PARAMETERS_IN, attributes))
            if {dict}.issuperset(map(type, owns)):
                handed_out = list(map(_WaitingParameters, owns))
                set_all(handed_out, "own", owns)
                put_parameters(attributes, handed_out)
            else:
                modules = self._modules_of[started]
            for module in modules:
                # Bypasses `nn.Module.__getattr__`, for speed. Stage 3's dicts handle reads themselves.
                own: Any = module.__dict__["_parameters"]
                if type(own) is dict:
                    module.__dict__["_parameters"] = guarded = _WaitingParameters(own)
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
        if {_WaitingParameters}.issuperset(map(type, handed_out)):
            owns = list(map(_OWN, handed_out))
            # As below.
            deque(map(dict.clear, owns), maxlen=0)
            deque(map(dict.update, owns, handed_out), maxlen=0)
            put_parameters(attributes, owns)
        else:
            modules = self._modules_of[bucket]
        for module in modules:
            guarded: Any = module.__dict__["_parameters"]
            if type(guarded) is _WaitingParameters and _ARRIVING.classes.isdisjoint(map(type, guarded.values())):
                own = guarded.own
                # Include entries that were set or deleted during the gather.
                own.clear()
                own.update(guarded)
                module.__dict__["_parameters"] = own

    def finish_all(self) -> None:
        for bucket in list(self._in_flight):
            self.finish(bucket)
