"""All-gathers of parameters after the step, and reads of parameters that wait for them.

A gather writes into the flat buffer while the script goes on, so a parameter read too early would be old on some ranks. While
its bucket is in flight, each module that holds one of its parameters has a `_parameters` dict that finishes the gather at the
first look. Forward, `parameters()`, `state_dict()`, `save_pretrained` and pickling all go through that dict. A list of
parameters that a script took beforehand does not: of those, torch asks before it reads one.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import torch
from torch import nn

from ...buckets.bucket import Bucket
from ...comm.transport import Handle
from ..guarded_parameters import GuardedParameters, ParametersGuard
from .arriving_parameter import expect, take_as_arrived
from .gathers import Gather

_FRAMES_TO_ZERO_GRAD = 8
"""zero_grad, parameters, named_parameters, _named_members and its callable lie between; some are generators."""


class InFlightParameters(GuardedParameters):
    """A module's `_parameters` while some are being all-gathered. Reading a value waits for its gather.

    `before_read` finishes the gather of one name, or of all the module's with None.
    """

    def __getitem__(self, name: str):
        self._before_read(name)
        return self.stock[name]

    def get(self, name: str, default=None):
        return self[name] if name in self.stock else default

    def __iter__(self):
        self._before_read(None)
        return iter(self.stock)

    def items(self):
        if not _only_gradients_are_read():
            self._before_read(None)
        return self.stock.items()

    def values(self):
        self._before_read(None)
        return self.stock.values()

    def keys(self):
        self._before_read(None)
        return self.stock.keys()

    def __setitem__(self, name: str, value) -> None:
        self._before_read(None)
        self.stock[name] = value

    def __delitem__(self, name: str) -> None:
        self._before_read(None)
        del self.stock[name]

    def pop(self, name: str, *default):
        self._before_read(None)
        return self.stock.pop(name, *default)

    def copy(self) -> dict:
        self._before_read(None)
        return self.stock.copy()

    def __reduce__(self):
        self._before_read(None)
        return dict, (dict(self.stock),)

    def __deepcopy__(self, memo: dict):
        self._before_read(None)
        return copy.deepcopy(self.stock, memo)


def _only_gradients_are_read() -> bool:
    """Whether `Module.zero_grad` is looking. Trainer calls it right after the step; waiting there would end the overlap."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_TO_ZERO_GRAD):
        if frame is None:
            return False
        if frame.f_code is nn.Module.zero_grad.__code__:
            return True
        frame = frame.f_back
    return False


class _HoldingModule:
    """A module that holds parameters which are gathered behind a step.

    Args:
        held: the bucket of each, by name.
        finish: waits for the gather of a bucket.
    """

    def __init__(self, module: nn.Module, held: dict[str, Bucket], finish: Callable[[Bucket], None]):
        self.buckets = tuple(dict.fromkeys(held.values()))
        self.guard = ParametersGuard(module, InFlightParameters, self._wait_for)
        self._held = held
        self._finish = finish

    def _wait_for(self, name: str | None) -> None:
        for bucket in self.buckets if name is None else (self._held[name],) if name in self._held else ():
            self._finish(bucket)


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
        bucket_of = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
        self._modules_of: dict[Bucket, list[_HoldingModule]] = {bucket: [] for bucket in bucket_of.values()}
        for module in model.modules():
            held = {name: bucket_of[p] for name, p in module._parameters.items() if p in bucket_of}
            if held:
                holding = _HoldingModule(module, held, self.finish)
                for bucket in holding.buckets:
                    self._modules_of[bucket].append(holding)

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Starts gathering what the optimizer has just updated in these buckets; who reads their parameters waits."""
        for bucket in buckets:
            self.finish(bucket)
            with bucket.tier.uplink.aside():
                self._in_flight[bucket] = self._gather.start(bucket)
        for started in buckets:
            for holding in self._modules_of[started]:
                holding.guard.put()
            expect(started.parameters)

    def finish(self, bucket: Bucket) -> None:
        """Waits for one bucket, and leaves modules whose parameters are all there with their own dicts."""
        handle = self._in_flight.pop(bucket, None)
        if handle is None:
            return
        handle.finish()
        take_as_arrived(bucket.parameters)
        in_flight = self._in_flight.keys()
        for holding in self._modules_of[bucket]:
            if in_flight.isdisjoint(holding.buckets):
                holding.guard.remove()

    def finish_all(self) -> None:
        for bucket in list(self._in_flight):
            self.finish(bucket)


def caches_parameters(model: nn.Module) -> bool:
    """Whether some module keeps its parameters in a list of its own, past its `_parameters` (torch's RNNs do)."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has been asked for somewhere in the module."""
    compiled = torch._dynamo.eval_frame.OptimizedModule if hasattr(torch, "_dynamo") else ()
    return any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in module.modules())
