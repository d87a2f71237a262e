"""Parameters while their values are sharded: shape, dtype and gradient are readable, values are not."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..hooks.guards import ALIASING, EDITS, LOOKS, Guard, Guarded, look_only
from ..hooks.tensors import leaves
from ..hooks.weak import engine_attached_to
from .sharded_gradient import unprepared_step

# A plain parameter would return the NaN that stands in for the values on other ranks. So a sharded parameter's class is
# replaced by a subclass of its class, whose `__torch_function__` decides about each operation. Operations that only look at
# shape or dtype pass. Reads gather the parameter inside a forward or backward, which all ranks run, and raise anywhere else.
# An elementwise edit, such as `clamp_(0, 1)`, needs no values of other ranks: each rank edits its own shard.

_DATA: Any = torch.Tensor.data

_REPLACING = frozenset({_DATA.__set__, torch.Tensor.set_})

_DIFFERENTIATING = (torch.autograd.backward, torch.autograd.grad)
"""Differentiate with respect to `inputs` without reading their values."""

_SPELLED = {
    "__reduce_ex__": "pickling",
    "__deepcopy__": "copy.deepcopy",
    "__getitem__": "indexing",
    "__setitem__": "indexing",
}


class ShardedParametersError(RuntimeError):
    """An operation needs whole parameters, but got sharded ones."""


class ShardedParameter(Guarded):
    """Guards a tensor whose values are sharded."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LOOKS:
            return torch.nn.Parameter.__torch_function__(func, types, args, kwargs)
        # An alias may be used only to look at the dtype, so its values are refused when read, not here.
        if func in ALIASING:
            return _alias_of(_parameter_of(args[0]))
        if func in EDITS and _edit_own(args[0], func, args[1:], kwargs):
            return args[0]
        # Compared by `==`: Python makes a new `__set__` at each access, so `is` would always be False.
        if func == _DATA.__set__ and isinstance(args[1], ShardedAlias) and args[1]._parameter is args[0]:
            # `p.data *= 2` edits the alias and then assigns the alias.
            return None
        if func in _DIFFERENTIATING:
            # torch passes `inputs` as a tuple, by name to `backward` and by position to `grad`.
            inputs = kwargs.pop("inputs") if "inputs" in kwargs else args[1]
            if any(map(are_hidden, inputs or ())):
                return _differentiate(func, args[0], inputs, kwargs)
            kwargs["inputs"], args = inputs, args[:1]
        for tensor in leaves((args, kwargs)):
            if isinstance(tensor, ShardedParameter):
                _fetch(_parameter_of(tensor), func)
        return func(*_whole(args), **_whole(kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument for subclasses that print values
        name = _name_of(_parameter_of(self))
        return f"{type(self).__name__}({name}, shape={tuple(self.shape)}, dtype={self.dtype}, on other ranks)"

    def __format__(self, _spec: str) -> str:
        return repr(self)


class ShardedAlias(ShardedParameter, torch.Tensor):
    """Stands for `p.data` and `p.detach()` while `p` is sharded. Reading its values counts as reading `p`."""

    _parameter: nn.Parameter


_HIDDEN = Guard(ShardedParameter)

hide_all = _HIDDEN.guard
"""Guards parameters from now on, because their values are sharded: torch calls the guard before each operation."""

show_all = _HIDDEN.unguard
"""Removes the guard again."""

hidden_classes = _HIDDEN.classes
"""The classes of guarded parameters, for loops in C."""

all_are_hidden = _HIDDEN.are_guarded
"""Whether all parameters are guarded."""


def hide_values(parameter: nn.Parameter) -> None:
    hide_all((parameter,))


def show_values(parameter: nn.Parameter) -> None:
    show_all((parameter,))


def are_hidden(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, ShardedParameter)


def unreadable(name: str, operation: str) -> ShardedParametersError:
    """Makes the error for reading or writing values of a sharded parameter outside of forward, backward and `gathered`."""
    return ShardedParametersError(
        f"hf_zero: {operation} needs the values of {name}, which is sharded over the ranks (stage 3): no rank has "
        "all of it now. Use `with hf_zero.gathered(model):` on every rank (to edit, `writeback=True`), or "
        "model.state_dict()."
    )


def _parameter_of(tensor: torch.Tensor) -> nn.Parameter:
    return tensor._parameter if isinstance(tensor, ShardedAlias) else cast(nn.Parameter, tensor)


def _alias_of(parameter: nn.Parameter) -> torch.Tensor:
    with look_only():
        # Without the guard: the guard itself calls this function and would recurse without end.
        alias = parameter.detach()
        if not are_hidden(parameter):
            return alias
        alias = alias.as_subclass(ShardedAlias)
    alias._parameter = parameter
    return alias


def _fetch(parameter: nn.Parameter, func: Callable) -> None:
    """Makes a parameter readable for an operation, or raises."""
    engine = engine_attached_to(parameter)
    # A previous argument's gather may already have gathered this parameter, if both are in one unit.
    if not are_hidden(parameter):
        return
    # Assigning new data is refused even in a pass: the next drop sets the parameter's data to its shard, losing the new data.
    if func in _REPLACING or engine is None or not engine.sharded.gather_in_pass(parameter):
        raise unprepared_step(lambda other: other is parameter) or unreadable(_name_of(parameter), _spelling(func))


def _differentiate(func: Callable, outputs: Any, inputs: Sequence[Any], kwargs: dict) -> Any:
    """Calls torch's `backward` or `grad` with the autograd nodes of sharded inputs instead of the guarded tensors.

    The guard stays enabled, because reads inside this backward need it.
    """
    named = {**kwargs, "inputs": [_edge_of(each) if are_hidden(each) else each for each in inputs]}
    if not kwargs.get("materialize_grads"):
        return func(outputs, **named)
    # Given a node, torch does not know the shape of the zeros, so make zeros below.
    found = func(outputs, **{**named, "materialize_grads": False, "allow_unused": True})
    zeros = partial(torch.zeros_like, requires_grad=kwargs["create_graph"])
    return tuple(zeros(each) if gradient is None else gradient for each, gradient in zip(inputs, found))


def _edge_of(tensor: torch.Tensor) -> Any:
    with look_only():
        # A frozen tensor has no node. An empty tensor makes torch raise its usual error for frozen inputs.
        return get_gradient_edge(tensor) if tensor.requires_grad else torch.empty(0)


def _edit_own(edited: torch.Tensor, func: Callable, args: tuple, kwargs: dict) -> bool:
    """Edits this rank's part of a parameter outside of forward and backward; returns False if other values are needed."""
    parameter = _parameter_of(edited)
    engine = engine_attached_to(parameter)
    operands = [each for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    # An operand with one value per element would have to be cut like the parameter. Scalars, as numbers or tensors, apply to
    # every shard.
    if any(isinstance(each, ShardedParameter) or each.dim() > 0 for each in operands):
        return False
    if engine is None or not are_hidden(parameter):
        return False
    if edited is parameter and parameter.requires_grad and torch.is_grad_enabled():
        # Raises torch's own error for an in-place edit of a leaf.
        func(torch.empty(0, requires_grad=True), *args, **kwargs)
    return engine.sharded.edit_own(parameter, lambda own: func(own, *args, **kwargs))


def _whole(values: Any) -> Any:
    """Replaces aliases made before a gather by the whole tensors."""
    if isinstance(values, list | tuple):
        whole = [_whole(value) for value in values]
        # A named tuple's constructor expects one argument per item; lists and plain tuples expect one iterable.
        return type(values)(*whole) if hasattr(values, "_fields") else type(values)(whole)
    if isinstance(values, dict):
        return {name: _whole(value) for name, value in values.items()}
    return values._parameter.detach() if isinstance(values, ShardedAlias) else values


def _name_of(parameter: nn.Parameter) -> str:
    engine = engine_attached_to(parameter)
    found = engine.sharded.unit_of.get(parameter) if engine is not None else None
    return repr(found[1].name) if found is not None else "a parameter"


def _spelling(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        attribute = f"p.{getattr(getattr(func, '__self__', None), '__name__', 'attribute')}"
        return f"`{attribute}`" if name == "__get__" else f"setting `{attribute}`"
    return f"`{_SPELLED.get(name, name)}`"
