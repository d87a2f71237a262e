"""Parameters while their values are sharded: shape, dtype and gradient can be read, values cannot.

An ordinary parameter would hand out the NaN that stands in for values which are on other ranks. So while a parameter is
sharded its class is a subclass of its own class, of which torch asks leave for each operation. Looks go through; reads
gather the parameter inside a forward or backward, where all ranks come by, and raise everywhere else.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from ..engine_reference import engine_attached_to
from .nested import leaves

if TYPE_CHECKING:
    # Mixed into classes of tensors: a type checker takes their attributes for inherited.
    from torch import Tensor as _TensorBase
else:
    _TensorBase = object

look_only = torch._C.DisableTorchFunctionSubclass
"""A context in which torch asks nobody: for loops of the engine's own that look at many parameters and read none."""

_ATTRIBUTES = """
    shape dtype device layout ndim itemsize nbytes names name output_nr grad_fn grad_dtype is_leaf requires_grad retains_grad
    volatile grad _grad _grad_fn _base _version _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_ipu is_maia is_meta
    is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu
"""

_METHODS = """
    size dim ndimension numel nelement stride storage_offset element_size get_device dim_order is_contiguous is_floating_point
    is_complex is_signed is_conj is_neg is_inference is_same_size is_set_to has_names _is_view requires_grad_ register_hook
    register_post_accumulate_grad_hook retain_grad new_empty new_empty_strided new_zeros new_ones new_full new_tensor __len__
    __hash__
"""

_FUNCTIONS = """
    numel is_floating_point is_complex is_signed is_conj is_neg is_inference is_same_size result_type get_device empty_like
    zeros_like ones_like full_like rand_like randn_like randint_like _has_compatible_shallow_copy_type
"""


def _existing(holder: object, names: str) -> list[Any]:
    return [getattr(holder, name) for name in names.split() if hasattr(holder, name)]


def _looks() -> frozenset[Callable]:
    """Everything that needs no values. torch spells the reading of an attribute as its descriptor's `__get__`."""
    found = [*_existing(torch.Tensor, _METHODS), *_existing(torch, _FUNCTIONS)]
    for attribute in _existing(torch.Tensor, _ATTRIBUTES):
        found += _existing(attribute, "__get__ __set__ __delete__")
    return frozenset(found)


_LOOKS = _looks()
_DATA: Any = torch.Tensor.data
_ALIASING = frozenset({_DATA.__get__, torch.Tensor.detach, torch.detach})
"""What hands out the same values under another name; whoever gets it may only want its dtype."""

_REPLACING = frozenset({_DATA.__set__, torch.Tensor.set_})

_SPELLED = {
    "__reduce_ex__": "pickling",
    "__deepcopy__": "copy.deepcopy",
    "__getitem__": "indexing",
    "__setitem__": "indexing",
}


_HIDING_KINDS: set[type] = set()
"""The classes of parameters whose values are hidden."""


class ShardedParametersError(RuntimeError):
    """An operation that needs whole parameters met sharded ones."""


class ShardedValues(_TensorBase):
    """Mixed into the class of a tensor whose values are sharded."""

    __slots__ = ()

    _whole_kind: ClassVar[type[nn.Parameter]]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _LOOKS:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _ALIASING:
            return _alias_of(_parameter_behind(args[0]))
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


def hide_values(parameter: nn.Parameter) -> None:
    """Has torch ask before each operation on a parameter, whose values are sharded from now on."""
    kind: Any = type(parameter)
    if not issubclass(kind, ShardedValues):
        parameter.__class__ = _hiding(kind)


def show_values(parameter: nn.Parameter) -> None:
    """Makes it an ordinary parameter again."""
    kind = type(parameter)
    if issubclass(kind, ShardedValues):
        parameter.__class__ = kind._whole_kind


def hide_all(parameters: Iterable[nn.Parameter]) -> None:
    """`hide_values` for many, which each layer comes to twice in a step."""
    for parameter in parameters:
        kind: Any = type(parameter)
        if kind not in _HIDING_KINDS:
            parameter.__class__ = _hiding(kind)


def show_all(parameters: Iterable[nn.Parameter]) -> None:
    """`show_values` for many."""
    for parameter in parameters:
        kind: Any = type(parameter)
        if kind in _HIDING_KINDS:
            parameter.__class__ = kind._whole_kind


def are_hidden(parameter: torch.Tensor) -> bool:
    """Whether the parameter's values are sharded, as far as torch is concerned."""
    return isinstance(parameter, ShardedValues)


def all_are_hidden(parameters: Iterable[torch.Tensor]) -> bool:
    """`are_hidden` of many."""
    return _HIDING_KINDS.issuperset(map(type, parameters))


@cache
def _hiding(kind: type) -> type[nn.Parameter]:
    hiding: Any = type(f"Sharded{kind.__name__}", (ShardedValues, kind), {"_whole_kind": kind})
    _HIDING_KINDS.add(hiding)
    return hiding


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
        raise unreadable(_name_of(parameter), _spelling(func))


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
