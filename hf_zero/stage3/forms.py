"""The two forms of a unit's parameters, whole and hidden, and the change from one to the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import nn

from ..buckets.bucket import Bucket
from ..buckets.gathered_memory import GatheredMemory
from ..buckets.sharded_parameter import all_are_hidden
from ..hooks.guards import look_only
from ..step.parameter_gather import PARAMETERS_IN

_SET, _UPDATE = dict.__setitem__, dict.update
_OWN_CLASS, _DATA = attrgetter("_own_class"), attrgetter("data")


class _Change(NamedTuple):
    """A change of all parameters of a unit, in one loop of `setattr`.

    Attributes:
        before: the parameters' classes before the change.
        sets: the arguments of the loop: parameters, names, values. A guarded parameter refuses new data, so it gets its plain
            class first when it becomes whole, and its guarded class last when it is hidden.
    """

    before: list[type]
    sets: tuple[Sequence[nn.Parameter], Sequence[str], Sequence[object]]


_UNKNOWN = _Change([], ((), (), ()))


class Forms:
    """Makes the parameters of a unit whole or hidden, and exchanges the dicts of their modules.

    A change like the last one is made in a few loops in C, from arguments made once. If a script has given a parameter another
    class or a module another dict since, or if exact values are gathered next to rounded ones, the memories set the data, and
    each module is looked at.

    Args:
        memories: the memories of the unit's buckets.

    Attributes:
        followers: called after each change, for modules with parameters of several units.
    """

    def __init__(self, memories: Mapping[Bucket, GatheredMemory]):
        self._memories = list(memories.values())
        self._parameters = [parameter for bucket in memories for parameter in bucket.parameters]
        self._views = [view for bucket in memories for view in bucket.views]
        self._set_data = [
            partial(memory.set_all_data, bucket.parameters, bucket.views) for bucket, memory in memories.items()
        ]
        self.followers: list[Callable[[], None]] = []
        self._shows = self._hides = _UNKNOWN
        self.exchange_dicts_of({})

    def exchange_dicts_of(self, modules: Mapping[nn.Module, Any]) -> None:
        """Sets the modules whose sharded parameters are all in this unit, each with the `ShardedParameters` of its dict."""
        # Bypasses `nn.Module.__getattr__`, for speed.
        self._attributes = [module.__dict__ for module in modules]
        self._sharded = list(modules.values())
        self._follow_modules()

    def show(self, *, is_usual: bool = True) -> None:
        """Makes whole parameters visible.

        Args:
            is_usual: they are the views of the buckets' flat memory.
        """
        before, sets = self._shows
        held = map(PARAMETERS_IN, self._attributes)
        if is_usual and list(map(type, self._parameters)) == before and all(map(is_, held, self._sharded)):
            # `setattr` and the methods of dict return None, so `any` runs to the end.
            any(map(setattr, *sets))
            any(map(_SET, *self._to_stocks))
            for follow in self.followers:
                follow()
        else:
            self._follow()

    def hide(self) -> None:
        """Hides the parameters' values, which have no memory."""
        before, sets = self._hides
        held = map(PARAMETERS_IN, self._attributes)
        if list(map(type, self._parameters)) == before and all(map(is_, held, self._stocks)):
            any(map(setattr, *sets))
            any(map(_UPDATE, self._sharded, self._stocks))
            any(map(_SET, *self._to_sharded))
            if sum(map(len, self._sharded)) != sum(map(len, self._stocks)):
                self._follow_deleted_names()
            for follow in self.followers:
                follow()
        else:
            self._follow()
            self._prepare()

    def forget(self) -> None:
        """Forgets the prepared changes, because parameters are to be shown in another dtype, or in their own again."""
        self._shows = self._hides = _UNKNOWN

    def _follow(self) -> None:
        for set_data in self._set_data:
            set_data()
        self._follow_modules()
        for follow in self.followers:
            follow()

    def _follow_modules(self) -> None:
        for each in self._sharded:
            each.follow_units()
        self._stocks = [each.stock for each in self._sharded]
        names = ["_parameters"] * len(self._sharded)
        # The arguments of loops of `dict.__setitem__`: dicts, names, values.
        self._to_stocks = self._attributes, names, self._stocks
        self._to_sharded = self._attributes, names, self._sharded

    def _follow_deleted_names(self) -> None:
        for sharded, stock in zip(self._sharded, self._stocks):
            if len(sharded) != len(stock):
                dict.clear(sharded)
                dict.update(sharded, stock)

    def _prepare(self) -> None:
        """Notes the change that has just hidden the parameters, and its opposite."""
        self.forget()
        parameters, count = self._parameters, len(self._parameters)
        if not all_are_hidden(parameters) or any(memory.read_as is not None for memory in self._memories):
            return
        hidden_kinds = list(map(type, parameters))
        kinds: list[type] = list(map(_OWN_CLASS, hidden_kinds))
        with look_only():
            absences = list(map(_DATA, parameters))
        owners, data, classes = [*parameters, *parameters], ["data"] * count, ["__class__"] * count
        self._shows = _Change(hidden_kinds, (owners, [*classes, *data], [*kinds, *self._views]))
        self._hides = _Change(kinds, (owners, [*data, *classes], [*absences, *hidden_kinds]))
