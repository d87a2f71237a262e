"""All-gathers of parameters after the step, and reads of parameters that wait for them.

A gather writes into the flat buffer while the script goes on, so a parameter read too early would be old on some ranks. While
its bucket is in flight, a parameter is of a class of which torch asks before it runs an operation on it. Code in C++ that is
handed a parameter asks nobody: a kernel of the script's own, or `torch.func`. Most often such code has just had it from a
module. So the modules that hold parameters in flight have dicts as their `_parameters` that wait when they hand one out.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from ..buckets.bucket import Bucket
from ..buckets.sharded import leaves
from ..comm.transport import Handle
from ..guard import LOOKS, Guard, Guarded
from ..hooks import engine_attached_to
from .collectives import Gather

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


class ParameterGather:
    """Starts the all-gathers of updated buckets, and finishes each at the first read of one of its parameters.

    Args:
        model: the module whose parameters lie in `buckets`.
        buckets: in gradient order; gathered in the reverse, the order in which forward needs them.
        gather: how.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket], gather: Gather):
        self._gather = gather
        self._in_flight: dict[Bucket, Handle] = {}
        self._bucket_of = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
        self._modules_of: dict[Bucket, list[nn.Module]] = {bucket: [] for bucket in self._bucket_of.values()}
        for module in model.modules():
            held = (self._bucket_of.get(p) for p in module.parameters(recurse=False))
            for bucket in dict.fromkeys(each for each in held if each is not None):
                self._modules_of[bucket].append(module)

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
            for module in self._modules_of[started]:
                # Past `nn.Module.__getattr__`, for speed. Dicts that stage 3 has put there look after reads themselves.
                own: Any = module.__dict__["_parameters"]
                if type(own) is dict:
                    module.__dict__["_parameters"] = guarded = _HandedOut(own)
                    guarded.own = own

    def finish_of(self, parameter: nn.Parameter) -> None:
        """Waits for the bucket of one parameter."""
        self.finish(self._bucket_of[parameter])

    def finish(self, bucket: Bucket) -> None:
        """Waits for one bucket, and leaves modules whose parameters are all there with their own dicts."""
        handle = self._in_flight.pop(bucket, None)
        if handle is None:
            return
        # Wait first, unguard second: a reader between the two would see half of the values.
        handle.finish()
        _ARRIVING.unguard(bucket.parameters)
        for module in self._modules_of[bucket]:
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


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has been asked for somewhere in the module."""
    compiled = torch._dynamo.eval_frame.OptimizedModule if "torch._dynamo" in sys.modules else ()
    return any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in module.modules())
