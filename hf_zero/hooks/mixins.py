"""Mixes a class into the class of an object of another package. The object copies and pickles as before."""

from abc import ABCMeta
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

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
