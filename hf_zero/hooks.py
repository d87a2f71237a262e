"""Hooks and references that keep no model alive, the tensors that hooks look for, replaced names, calls after imports, guards."""

import sys
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import getattr_static
from itertools import repeat
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame
from torch._C._dynamo.eval_frame import get_eval_frame_callback as _compiler
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

# ---- Modes of a script (TorchDispatchMode, TorchFunctionMode), which see no operation of the engine ----
#
# Selective checkpointing counts a layer's operations in forward, and expects as many of each in the recomputation, where the
# engine gathers other layers. Modes that log or count operations would count the engine's as the model's.

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes see dispatched operations. In a backward no other modes are on: torch's `backward` takes them off."""

_function_modes = torch._C._len_torch_function_stack


@contextmanager
def without_modes() -> Iterator[None]:
    """Takes all modes off for operations of the engine."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(_function_modes())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def hidden_from_modes(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates a function of the engine whose operations no mode sees. Without modes it costs little."""

    @wraps(function)
    def without(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if not (dispatch_modes() or _function_modes()):
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return without


# ---- Module hooks that are not copied or pickled with the model ----


class WeakMethod:
    """Calls `function(owner, *args)` while `owner` lives, and does nothing in a copied or unpickled object."""

    def __init__(self, owner: object | None, function: Callable[..., Any] | None):
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._function = function

    def __call__(self, *args, **kwargs):
        owner, function = self._owner(), self._function
        return None if owner is None or function is None else function(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "WeakMethod":
        return type(self)(None, None)

    def __reduce__(self):
        return type(self), (None, None)


class WeakHook(WeakMethod):
    """A hook of a module or an optimizer that modes do not see, and that torch.compile calls without tracing the hook.

    A module's hooks are part of the module: with a plain bound method there, `copy.deepcopy(model)` would copy the engine
    with its buffers, and `torch.save(model)` would pickle it.

    Attributes:
        was_compiled: a compiled function has called the hook.
    """

    was_compiled = False

    def __call__(self, *args, **kwargs):
        if _compiler() is None and not (dispatch_modes() or _function_modes()):
            owner, function = self._owner(), self._function
            return None if owner is None or function is None else function(owner, *args, **kwargs)
        return self._call_apart(args, kwargs)

    def _call_apart(self, args: tuple, kwargs: dict) -> Any:
        compiler = set_eval_frame(None)
        try:
            self.was_compiled |= compiler is not None
            with without_modes():
                return super().__call__(*args, **kwargs)
        finally:
            set_eval_frame(compiler)


def caller_of_hook() -> FrameType | None:
    """The frame that has called the hook whose function asks, past the frames of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


# Two ways into the compiler: a hook may be called by a function that is traced, or its frame may be the first of a trace.
vars(WeakHook.__call__)["_torchdynamo_disable"] = True
for _method in (WeakHook.__call__, WeakHook._call_apart):
    set_code_exec_strategy(_method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


# ---- Finds the engine that trains a model or a parameter ----

_ATTRIBUTE = "_hf_zero_engine"


class EngineReference:
    """Points to an engine. Copies and pickles of the holder get an empty reference.

    Args:
        keeps: the engine lives as long as its model, which is of no use without it. Else the pointer is weak.
    """

    def __init__(self, engine: object | None = None, *, keeps: bool = False):
        self._engine = (lambda: engine) if keeps or engine is None else weakref.ref(engine)

    def __call__(self) -> Any:
        return self._engine()

    def __deepcopy__(self, memo: dict) -> "EngineReference":
        return EngineReference()

    def __reduce__(self):
        return EngineReference, ()


def attach(engine: object, holders: Iterable[nn.Module | nn.Parameter], *, keeps: bool) -> None:
    """Tells modules and parameters their engine."""
    reference = EngineReference(engine, keeps=keeps)
    for holder in holders:
        holder.__dict__[_ATTRIBUTE] = reference


def detach(holders: Iterable[nn.Module | nn.Parameter]) -> None:
    for holder in holders:
        holder.__dict__.pop(_ATTRIBUTE, None)


def engine_attached_to(holder: nn.Module | nn.Parameter) -> Any:
    """Returns the live ZeroEngine of a module that was handed to `ZeroEngine`, or of its parameter; or None."""
    reference = holder.__dict__.get(_ATTRIBUTE)
    return reference() if isinstance(reference, EngineReference) else None


# ---- Tensors in what a forward takes and returns, and whether a forward is a recomputation ----

_LEAVES = frozenset({type(None), bool, int, float, str})
_PLAIN = _LEAVES | {torch.Tensor, nn.Parameter}
_IS_TENSOR: Callable[[object], bool] = torch.Tensor.__instancecheck__


def differentiable_tensors(value: object) -> list[torch.Tensor]:
    """The tensors that take gradients in nested lists, tuples, dicts, ModelOutputs and dataclasses."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in the same places."""
    if isinstance(value, torch.Tensor):
        return [value]
    # Plain nests are looked through here: torch's walk takes several times as long, and each layer is looked at.
    kind = type(value)
    if kind in _LEAVES:
        return []
    found = []
    if kind is tuple or kind is list or kind is dict:
        items = value.values() if kind is dict else value
        if _PLAIN.issuperset(map(type, items)):
            # Nearly always: in a loop in C.
            return list(filter(_IS_TENSOR, items))
        for item in items:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif type(item) not in _LEAVES:
                found += tensors_in(item)
        return found
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        # torch's walk takes a dataclass for a leaf, and would miss the tensors that a model returns in one. Python takes the
        # class itself for a dataclass, too, which has no values.
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in(list(vars(leaf).values()))
    return found


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def set_all(owners: Iterable[Any], name: str, values: Iterable[Any]) -> None:
    """Sets an attribute of many objects in a loop in C, which takes a tenth of a loop in Python."""
    # `setattr` returns None, so `any` goes on to the end.
    any(map(setattr, owners, repeat(name), values))


# ---- A call after the import of another package ----


class AfterImport(MetaPathFinder):
    """Runs each package's call once, right after its import, or at once if it is imported already. A context manager.

    Args:
        calls: package's name → what to call with its module.
    """

    def __init__(self, calls: Mapping[str, Callable[[ModuleType], None]]):
        self._names = frozenset(calls)
        self._waiting = dict(calls)

    def knows(self, name: str) -> bool:
        """Whether it has, or had, a call for this package."""
        return name in self._names

    def __enter__(self) -> "AfterImport":
        # In front: Python asks no further finder once one has found the package.
        sys.meta_path.insert(0, self)
        for name in self._waiting.keys() & sys.modules.keys():
            self._waiting.pop(name)(sys.modules[name])
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec, with a loader that runs the call after loading."""
        if fullname not in self._waiting:
            return None
        # Not `importlib.util.find_spec`, which would ask this finder again.
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._follow(fullname, spec.loader)
        return spec

    def _follow(self, name: str, loader: Loader) -> None:
        execute = loader.exec_module
        seen: Any = loader

        def exec_module(module: ModuleType) -> None:
            # The loader is the module's own from here on, as if nobody had looked.
            del seen.exec_module
            execute(module)
            call = self._waiting.pop(name, None)
            if call is not None:
                call(module)

        seen.exec_module = exec_module


# ---- A name of another package, replaced for a while ----


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a name of a class, module or object of another package by `value` inside."""
    # `getattr` would take the function out of a static method, and restore a plain one that gets `self`.
    before, is_own = getattr_static(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        # Another package, or the script, may have given an object a function of the object's own.
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


# ---- Guards: classes mixed before those of objects of others, and parameters of which torch asks before each read ----
#
# torch asks a class with `__torch_function__` before any operation, and Parameter is no such class. So while a parameter's values
# must not be read, its class is a subclass of its own class and of a mixin that answers torch.

if TYPE_CHECKING:
    # Mixed into classes of tensors: a type checker takes their attributes for inherited.
    from torch import Tensor as _TensorBase
else:
    _TensorBase = object

look_only = torch._C.DisableTorchFunctionSubclass
"""A context without these questions, for the engine's own loops over many parameters that read no values."""

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
    """Lists all operations that need no values. torch spells the reading of an attribute as its descriptor's `__get__`."""
    found = [*_existing(torch.Tensor, _METHODS), *_existing(torch, _FUNCTIONS)]
    for attribute in _existing(torch.Tensor, _ATTRIBUTES):
        # With the setters: `grad` or `requires_grad` of a guarded parameter may be set as well as read.
        found += _existing(attribute, "__get__ __set__ __delete__")
    return frozenset(found)


LOOKS = _looks()
"""The operations that need no values."""

EDITS = frozenset([*_existing(torch.Tensor, _EDITS), *_existing(torch, _EDITS)])
"""The operations that edit each element by itself, if their other operands are numbers."""

ALIASING = frozenset([*_existing(torch.Tensor.data, "__get__"), torch.Tensor.detach, torch.detach])
"""Operations that return the same values under another name; the caller may only want the dtype."""


_MARK = "_is_made_by_hf_zero"


class _Unannounced:
    """Comes before a script's class in a class made by `named_as`, and leaves out its `__init_subclass__` for that class."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if _MARK not in vars(cls):
            super().__init_subclass__(**kwargs)


def named_as(mixin: type, kind: type, *, keeps_layout: bool = False, **members: Any) -> type:
    """Makes a subclass of `kind` with `mixin` before it, and with the name and module of `kind`.

    The script did not ask for this class. So neither the `__init_subclass__` of `kind` nor its metaclass's `__new__` and
    `__init__` are called: these may require arguments, register each class, or forbid subclasses.

    Args:
        keeps_layout: extends `kind` alone, and adds `mixin` to the order of resolution only. Objects then have the layout of
            `kind`, but Python caches no attributes of the class.
    """
    shown: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    shown[_MARK] = True
    metaclass: Any = type(kind)
    bases: tuple[type, ...] = (mixin, _Unannounced, kind)
    if keeps_layout:
        metaclass, bases = _resolving_first(mixin, metaclass), (kind,)
        shown["__slots__"] = ()
    # ABCMeta keeps a store of known subclasses in each class. Without its `__new__`, this class would share that of `kind`.
    make: Any = ABCMeta if issubclass(metaclass, ABCMeta) else type
    made = make.__new__(metaclass, kind.__name__, bases, shown | members)
    if issubclass(metaclass, type(torch.Tensor)):
        # torch frees tensors of this class by a function that its metaclass sets here.
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


# Cached: else two objects of one class would get different classes, and each call would leave a class behind.
@cache
def _mixed(mixin: type, kind: type, *, keeps_layout: bool) -> type:
    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        # pickle finds a class by its name, and this one has the name of another.
        make, arguments, *rest = super(made, self).__reduce_ex__(protocol)
        own = (kind if each is made else each for each in (make, *arguments))
        return _remade, (mixin, *own), *rest

    def __copy__(self: Any) -> Any:
        # By default a shallow copy would leave out what a pickle does.
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
    """Replaces the class of an object by one with `mixin` before it. A second call changes nothing.

    `repr`, the class's name and its module stay. Copies and pickles get the mixin, too.
    """
    if isinstance(instance, mixin):
        return
    kind: Any = type(instance)
    # By object's own attribute: accelerate's data loaders have another of that name, which cannot be set.
    replace = vars(object)["__class__"].__set__
    try:
        replace(instance, _mixed(mixin, kind, keeps_layout=False))
    except TypeError:
        # A first base without `__dict__`, such as ABC or Generic, gives `kind` a layout that `mixin` before it would change.
        replace(instance, _mixed(mixin, kind, keeps_layout=True))


class Guarded(_TensorBase):
    """The base of the mixins of guards."""

    __slots__ = ()

    _own_class: ClassVar[type]


class Guard:
    """Puts a mixin into the class of parameters or other tensors, and takes it out again.

    Args:
        mixin: answers torch in `__torch_function__`.

    Attributes:
        classes: of guarded parameters.
    """

    def __init__(self, mixin: type[Guarded]):
        self._mixin = mixin
        self._made: dict[type, type] = {}
        self.classes: set[type] = set()

    def guard(self, parameters: Sequence[torch.Tensor]) -> None:
        """Guards these parameters. Each layer of stage 3 comes here twice in a step."""
        kinds = set(map(type, parameters))
        if len(kinds) == 1 and kinds.isdisjoint(self.classes):
            # Nearly always: in a loop in C.
            (only,) = kinds
            set_all(parameters, "__class__", repeat(self._made.get(only) or self._make(only)))
            return
        for parameter in parameters:
            kind: Any = type(parameter)
            # A guarded class is left alone: guarded once more, a parameter would stay guarded after one `unguard`.
            if kind not in self.classes:
                parameter.__class__ = self._made.get(kind) or self._make(kind)

    def unguard(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gives these parameters their own classes again."""
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
