"""Guards: mixins for classes of other packages, and parameters whose values must not be read for a while.

Before any operation on a tensor, torch calls `__torch_function__` if its class defines one; Parameter does not. So while the
values of a parameter must not be read, its class is a subclass of its own class and of a mixin with `__torch_function__`.
"""

from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .tensors import set_all

if TYPE_CHECKING:
    # The mixins are only used with tensor classes, so let type checkers assume the attributes of tensors.
    from torch import Tensor as _TensorBase
else:
    _TensorBase = object

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


_MARK = "_is_made_by_hf_zero"


class _Unannounced:
    """Precedes a script's class in the bases of a class made by `named_as`, and skips the script's `__init_subclass__` for it."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if _MARK not in vars(cls):
            super().__init_subclass__(**kwargs)


def named_as(mixin: type, kind: type, *, keeps_layout: bool = False, **members: Any) -> type:
    """Makes a subclass of `kind` with `mixin` first in its bases, and with the name and module of `kind`.

    The script did not create this class. So the `__init_subclass__` of `kind`, and `__new__` and `__init__` of its metaclass, are
    not called: these may require arguments, register each class, or forbid subclasses.

    Args:
        keeps_layout: extends only `kind`, and adds `mixin` to the method resolution order only. Objects then keep the layout of
            `kind`, but Python caches no attributes of the class.
    """
    shown: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    shown[_MARK] = True
    metaclass: Any = type(kind)
    bases: tuple[type, ...] = (mixin, _Unannounced, kind)
    if keeps_layout:
        metaclass, bases = _resolving_first(mixin, metaclass), (kind,)
        shown["__slots__"] = ()
    # ABCMeta stores known subclasses in each class. Without ABCMeta's `__new__`, this class would share the store of `kind`.
    make: Any = ABCMeta if issubclass(metaclass, ABCMeta) else type
    made = make.__new__(metaclass, kind.__name__, bases, shown | members)
    if issubclass(metaclass, type(torch.Tensor)):
        # This sets the function with which torch frees tensors of the class.
        type(torch.Tensor).__init__(made, kind.__name__, bases, {})
    return made


def _resolving_first(mixin: type, metaclass: Any) -> Any:
    """Returns a metaclass whose classes resolve `mixin` before their only base."""

    def mro(made: type) -> list[type]:
        by_bases = metaclass.mro(made)
        # A subclass of a made class inherits the order of its base.
        first = [kind for kind in (*mixin.__mro__, _Unannounced) if kind not in by_bases]
        return [by_bases[0], *first, *by_bases[1:]]

    shown = {"__module__": metaclass.__module__, "__qualname__": metaclass.__qualname__}
    return type(metaclass.__name__, (metaclass,), shown | {"mro": mro})


# Cached, because otherwise two objects of one class would get different classes, and each call would leave a class in memory.
@cache
def _mixed(mixin: type, kind: type, *, keeps_layout: bool) -> type:
    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        # pickle finds a class by its name, and this class has the name of `kind`.
        make, arguments, *rest = super(made, self).__reduce_ex__(protocol)
        own = (kind if each is made else each for each in (make, *arguments))
        return _remade, (mixin, *own), *rest

    def __copy__(self: Any) -> Any:
        # Python's default shallow copy would use `__reduce_ex__` and make the same omissions as a pickle.
        again = made.__new__(made)
        again.__dict__.update(self.__dict__)
        return again

    own = {} if hasattr(kind, "__copy__") else {"__copy__": __copy__}
    made: Any = named_as(mixin, kind, keeps_layout=keeps_layout, __reduce_ex__=__reduce_ex__, **own)
    return made


def _remade(mixin: type, make: Callable[..., Any], *arguments: Any) -> Any:
    instance = make(*arguments)
    mix_in(instance, mixin)
    return instance


def mix_in(instance: Any, mixin: type) -> None:
    """Replaces the class of an object by a subclass with `mixin` first. A second call changes nothing.

    `repr` and the name and module of the class do not change. Copies and pickles have the mixin as well.
    """
    if isinstance(instance, mixin):
        return
    kind: Any = type(instance)
    # Use object's own attribute, because accelerate's data loaders define a read-only `__class__`.
    replace = vars(object)["__class__"].__set__
    try:
        replace(instance, _mixed(mixin, kind, keeps_layout=False))
    except TypeError:
        # If the first base has no `__dict__` (ABC, Generic), a mixin before this base would change the layout of `kind`.
        replace(instance, _mixed(mixin, kind, keeps_layout=True))


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
