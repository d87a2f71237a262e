"""Parameters on their way back: all-gathers behind the step, and reads that wait for them.

A gather writes into the flat buffer while the script goes on, so a parameter read too early would be old on some ranks. While
its bucket is in flight, each module that holds one of its parameters has a `_parameters` dict that finishes the gather at the
first look. Forward, `parameters()`, `state_dict()`, `save_pretrained` and pickling all go through that dict; a list of
parameters that a script took beforehand does not, and must call `engine.finish_parameters()`.
"""

import copy
import sys
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..comm.transport import Handle
from .buckets import Bucket
from .gathers import Gather

_FRAMES_TO_ZERO_GRAD = 8
"""zero_grad, parameters, named_parameters, _named_members and its callable lie between; some are generators."""


class InFlightParameters(dict):
    """A module's parameters, some of which are being gathered. Any look at a value waits for what it needs.

    Args:
        parameters: the module's own dict, which takes this one's place again once all are there.
        wait_for: finishes the gather of one name, or of all the module's with None.
    """

    def __init__(self, parameters: dict, wait_for: Callable[[str | None], None]):
        super().__init__(parameters)
        self.settled = parameters
        self._wait_for = wait_for

    def __getitem__(self, name: str):
        self._wait_for(name)
        return self.settled[name]

    def get(self, name: str, default=None):
        return self[name] if name in self.settled else default

    def __iter__(self):
        self._wait_for(None)
        return iter(self.settled)

    def items(self):
        if not _only_gradients_are_read():
            self._wait_for(None)
        return self.settled.items()

    def values(self):
        self._wait_for(None)
        return self.settled.values()

    def keys(self):
        self._wait_for(None)
        return self.settled.keys()

    def __setitem__(self, name: str, value) -> None:
        self._wait_for(None)
        self.settled[name] = value

    def __delitem__(self, name: str) -> None:
        self._wait_for(None)
        del self.settled[name]

    def pop(self, name: str, *default):
        self._wait_for(None)
        return self.settled.pop(name, *default)

    def copy(self) -> dict:
        self._wait_for(None)
        return self.settled.copy()

    def __reduce__(self):
        self._wait_for(None)
        return dict, (dict(self.settled),)

    def __deepcopy__(self, memo: dict):
        self._wait_for(None)
        return copy.deepcopy(self.settled, memo)


def _only_gradients_are_read() -> bool:
    """Whether `Module.zero_grad` is looking. Trainer calls it right after the step; waiting there would end the overlap."""
    frame = sys._getframe(2)
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
        bucket_of = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
        self._homes: list[tuple[nn.Module, dict[str, Bucket]]] = []
        for module in model.modules():
            held = {name: bucket_of[p] for name, p in module._parameters.items() if p in bucket_of}
            if held:
                self._homes.append((module, held))

    def start(self, buckets: Iterable[Bucket]) -> None:
        """Starts gathering what the optimizer has just updated in these buckets."""
        for bucket in buckets:
            self.finish(bucket)
            self._in_flight[bucket] = self._gather.start(bucket)

    def guard(self) -> None:
        """Makes every module that holds a parameter in flight wait for it when it is read."""
        for module, held in self._homes:
            if not isinstance(module._parameters, InFlightParameters) and any(
                b in self._in_flight for b in held.values()
            ):
                self._guard_module(module, held)

    def finish(self, bucket: Bucket) -> None:
        handle = self._in_flight.pop(bucket, None)
        if handle is not None:
            handle.finish()

    def finish_all(self) -> None:
        for bucket in list(self._in_flight):
            self.finish(bucket)
        for module, _ in self._homes:
            if isinstance(module._parameters, InFlightParameters):
                module.__dict__["_parameters"] = module._parameters.settled

    def _guard_module(self, module: nn.Module, held: dict[str, Bucket]) -> None:
        def wait_for(name: str | None) -> None:
            names = held if name is None else [name] if name in held else []
            for wanted in names:
                self.finish(held[wanted])
            if not any(bucket in self._in_flight for bucket in held.values()):
                module.__dict__["_parameters"] = settled

        settled = module._parameters
        module.__dict__["_parameters"] = InFlightParameters(settled, wait_for)


def caches_parameters(model: nn.Module) -> bool:
    """Whether some module keeps its parameters in a list of its own, past its `_parameters` (torch's RNNs do)."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has been asked for somewhere in the module."""
    compiled = torch._dynamo.eval_frame.OptimizedModule if hasattr(torch, "_dynamo") else ()
    return any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in module.modules())
