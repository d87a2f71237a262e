"""Parameters whose values are on their way behind a step: whoever reads them waits for them.

Modules wait when they are asked for a parameter. A list of parameters that a script took beforehand asks no module.
"""

from typing import Any

import torch

from ...buckets.nested import leaves
from ...disguise import LOOKS, Disguise, Disguised
from ...engine_reference import engine_attached_to


class ArrivingValues(Disguised):
    """Mixed into the class of a parameter that an all-gather is writing to."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LOOKS:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        for tensor in leaves((args, kwargs)):
            if isinstance(tensor, ArrivingValues):
                _wait_for(tensor)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        # Parameter's own would make a copy of this class.
        _wait_for(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return self.__reduce_ex__(protocol)


_ARRIVING = Disguise(ArrivingValues)

expect = _ARRIVING.put_on
"""Has whoever reads these parameters wait for their engine's all-gathers."""

take_as_arrived = _ARRIVING.take_off
"""Makes them ordinary parameters again."""


def _wait_for(parameter: Any) -> None:
    engine = engine_attached_to(parameter)
    if engine is not None:
        engine.finish_parameters()
    # Also where the engine has gone, or its all-gather has failed: to ask once more would not end.
    take_as_arrived((parameter,))
