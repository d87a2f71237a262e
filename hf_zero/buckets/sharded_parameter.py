"""Parameters while their values are sharded: shape, dtype and gradient can be read, values cannot.

An ordinary parameter would hand out the NaN that stands in for values which are on other ranks. So while a parameter is
sharded its class is a subclass of its own class, of which torch asks leave for each operation. Looks go through; reads
gather the parameter inside a forward or backward, where all ranks come by, and raise everywhere else. An edit of each element
by itself, such as `clamp_(0, 1)`, needs no other rank's: each edits its shard.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from ..disguise import ALIASING, EDITS, LOOKS, Disguise, Disguised, look_only
from ..engine_reference import engine_attached_to
from .gradient_tensors import unprepared_step
from .nested import leaves

_DATA: Any = torch.Tensor.data

_REPLACING = frozenset({_DATA.__set__, torch.Tensor.set_})

_SPELLED = {
    "__reduce_ex__": "pickling",
    "__deepcopy__": "copy.deepcopy",
    "__getitem__": "indexing",
    "__setitem__": "indexing",
}


class ShardedParametersError(RuntimeError):
    """An operation that needs whole parameters met sharded ones."""


class ShardedValues(Disguised):
    """Mixed into the class of a tensor whose values are sharded."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LOOKS:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in ALIASING:
            return _alias_of(_parameter_behind(args[0]))
        if func in EDITS and _edit_own(args[0], func, args[1:], kwargs):
            return args[0]
        if func == _DATA.__set__ and isinstance(args[1], ShardedAlias) and args[1]._parameter is args[0]:
            # `p.data *= 2` sets what it has edited.
            return None
        for tensor in leaves((args, kwargs)):
            if isinstance(tensor, ShardedValues):
                _bring(_parameter_behind(tensor), func)
        return func(*_whole(args), **_whole(kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument for subclasses that print values
        name = _name_of(_parameter_behind(self))
        return f"{type(self).__name__}({name}, shape={tuple(self.shape)}, dtype={self.dtype}, on other ranks)"

    def __format__(self, _spec: str) -> str:
        return repr(self)


class ShardedAlias(ShardedValues, torch.Tensor):
    """What `p.data` and `p.detach()` return while `p` is sharded. Reading its values counts as reading `p`."""

    _parameter: nn.Parameter


_HIDDEN = Disguise(ShardedValues)

hide_all = _HIDDEN.put_on
"""Has torch ask before each operation on parameters, whose values are sharded from now on."""

show_all = _HIDDEN.take_off
"""Makes them ordinary parameters again."""

all_are_hidden = _HIDDEN.all_wear_it
"""Whether all values are sharded, as far as torch is concerned."""


def hide_values(parameter: nn.Parameter) -> None:
    """`hide_all` for one."""
    hide_all((parameter,))


def show_values(parameter: nn.Parameter) -> None:
    """`show_all` for one."""
    show_all((parameter,))


def are_hidden(parameter: torch.Tensor) -> bool:
    """Whether the parameter's values are sharded, as far as torch is concerned."""
    return isinstance(parameter, ShardedValues)


def unreadable(name: str, operation: str) -> ShardedParametersError:
    """The error for reading or writing values of a sharded parameter where only this rank may be."""
    return ShardedParametersError(
        f"hf_zero: {operation} needs the values of {name}, which is sharded over the ranks (stage 3): no rank has all of it now. "
        "Do it on every rank inside `with hf_zero.gathered(model):` (a part of the model or a few parameters take less memory), "
        "and with `writeback=True` if it edits them; or read model.state_dict(), on every rank. After training, "
        "hf_zero.engine_of(model).close(), on every rank, makes an ordinary model of it."
    )


def _parameter_behind(tensor: torch.Tensor) -> nn.Parameter:
    return tensor._parameter if isinstance(tensor, ShardedAlias) else cast(nn.Parameter, tensor)


def _alias_of(parameter: nn.Parameter) -> torch.Tensor:
    with look_only():
        alias = parameter.detach()
        if not are_hidden(parameter):
            return alias
        alias = alias.as_subclass(ShardedAlias)
    alias._parameter = parameter
    return alias


def _bring(parameter: nn.Parameter, func: Callable) -> None:
    """Makes a parameter readable for an operation, or raises."""
    engine = engine_attached_to(parameter)
    if not are_hidden(parameter):
        return
    if func in _REPLACING or engine is None or not engine.sharded.gather_in_pass(parameter):
        raise unprepared_step(lambda other: other is parameter) or unreadable(_name_of(parameter), _spelling(func))


def _edit_own(edited: torch.Tensor, func: Callable, args: tuple, kwargs: dict) -> bool:
    """Edits this rank's part of a parameter outside of forward and backward; False where more is needed."""
    parameter = _parameter_behind(edited)
    engine = engine_attached_to(parameter)
    operands = [each for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if any(isinstance(each, ShardedValues) or each.dim() > 0 for each in operands):
        return False
    if engine is None or not are_hidden(parameter):
        return False
    if edited is parameter and parameter.requires_grad and torch.is_grad_enabled():
        # torch's own refusal.
        func(torch.empty(0, requires_grad=True), *args, **kwargs)
    return engine.sharded.edit_own(parameter, lambda own: func(own, *args, **kwargs))


def _whole(values: Any) -> Any:
    """Arguments with what is whole by now in place of aliases that were taken before."""
    if isinstance(values, list | tuple):
        whole = [_whole(value) for value in values]
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
