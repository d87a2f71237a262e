"""Guards, which raise an error or wait before an operation on a tensor whose values must not be read yet.

Before any operation on a tensor, torch calls `__torch_function__` if its class defines one; Parameter does not. So while the
values of a parameter must not be read, its class is a subclass of its own class and of a mixin with `__torch_function__`.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .tensors import set_all

if TYPE_CHECKING:
    # The mixins are only used with tensor classes, so let type checkers assume the attributes of tensors.
    from torch import Tensor as _TensorBase
else:
    _TensorBase = object
from .mixins import named_as

look_only = torch._C.DisableTorchFunctionSubclass
"""A context without `__torch_function__` calls, for the engine's own loops over many parameters that read no values."""


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


_EDITS = """
    abs_ add_ clamp_ clamp_max_ clamp_min_ clip_ div_ divide_ exp_ fill_ log_ mul_ multiply_ nan_to_num_ neg_ pow_ round_ sign_
    sqrt_ sub_ subtract_ tanh_ true_divide_ trunc_ zero_ __iadd__ __imul__ __isub__ __itruediv__ __ipow__
"""


def _existing(holder: object, names: str) -> list[Any]:
    return [getattr(holder, name) for name in names.split() if hasattr(holder, name)]


def _looks() -> frozenset[Any]:
    """Lists all operations without a need for values. torch reports reading an attribute as its descriptor's `__get__`."""
    found = [*_existing(torch.Tensor, _METHODS), *_existing(torch, _FUNCTIONS)]
    for attribute in _existing(torch.Tensor, _ATTRIBUTES):
        # Include setters, because `grad` and `requires_grad` of a guarded parameter may be set as well as read.
        found += _existing(attribute, "__get__ __set__ __delete__")
    return frozenset(found)


LOOKS = _looks()
"""The operations that need no values."""


EDITS = frozenset([*_existing(torch.Tensor, _EDITS), *_existing(torch, _EDITS)])
"""Operations that edit each element separately if their other operands are numbers."""


ALIASING = frozenset([*_existing(torch.Tensor.data, "__get__"), torch.Tensor.detach, torch.detach])
"""Operations that return an alias of the same values; the caller may only want the dtype."""


class Guarded(_TensorBase):
    """Base class of the mixins of guards."""

    __slots__ = ()

    _own_class: ClassVar[type]


class Guard:
    """Adds a mixin to the class of parameters or other tensors, and removes the mixin again.

    Args:
        mixin: implements `__torch_function__`.

    Attributes:
        classes: the classes of guarded parameters.
    """

    def __init__(self, mixin: type[Guarded]):
        self._mixin = mixin
        self._made: dict[type, type] = {}
        self.classes: set[type] = set()

    def guard(self, parameters: Sequence[torch.Tensor]) -> None:
        """Guards these parameters. Stage 3 calls this twice for each layer in a step."""
        kinds = set(map(type, parameters))
        if len(kinds) == 1 and kinds.isdisjoint(self.classes):
            # The usual case is one class, set in a loop in C.
            (only,) = kinds
            set_all(parameters, "__class__", repeat(self._made.get(only) or self._make(only)))
            return
        for parameter in parameters:
            kind: Any = type(parameter)
            # Skip guarded classes: a parameter guarded twice would stay guarded after one `unguard`.
            if kind not in self.classes:
                parameter.__class__ = self._made.get(kind) or self._make(kind)

    def unguard(self, parameters: Sequence[torch.Tensor]) -> None:
        """Restores the own classes of these parameters."""
        kinds: set[Any] = set(map(type, parameters))
        if len(kinds) == 1 and kinds <= self.classes:
            set_all(parameters, "__class__", repeat(kinds.pop()._own_class))
            return
        if kinds.isdisjoint(self.classes):
            return
        for parameter in parameters:
            kind: Any = type(parameter)
            if kind in self.classes:
                parameter.__class__ = kind._own_class

    def are_guarded(self, parameters: Iterable[torch.Tensor]) -> bool:
        return self.classes.issuperset(map(type, parameters))

    def _make(self, kind: type) -> type:
        made = self._made[kind] = named_as(self._mixin, kind, _own_class=kind)
        self.classes.add(made)
        return made
