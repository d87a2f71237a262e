"""Stand-ins for gradients and parameters stored as shards on the ranks."""

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from ..hooks.guards import ALIASING, EDITS, LOOKS, Guard, Guarded, look_only
from ..hooks.tensors import set_all
from ..hooks.weak import WeakMethod, engine_attached_to

# ---- Tensors inside the nested arguments of a torch function ----


def leaves(value: Any) -> Iterator[Any]:
    """Yields all leaves of nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


# ---- Stand-ins in `.grad`: sharded gradients, this rank's shards, and clipped shards ----
#
# `ShardedGradient` replaces `p.grad` once the gradient has been reduced into shards, when no rank has the whole gradient any
# more. If `p.grad` were None, `torch.nn.utils.clip_grad_norm_` and scripts that read `p.grad` would silently skip the
# parameter. The stand-in has the parameter's shape and dtype, allocates no memory, and raises when read.
#
# The script decides how two backwards combine. `grad = None`: autograd starts again. Zeroed: the stand-in notes the zeroing,
# and a parameter unused in the next backward is stepped with zeros. Neither: autograd adds, as in gradient accumulation. A
# step frees the reduced gradient. Gradients computed after a step without zeroing are dropped; a discriminator, for example,
# gets such gradients from the generator's loss. A second step without zeroing raises: the sum would lack the freed gradient.
#
# The shards in the optimizer's groups also have gradients between backward and step. The norm of one shard is not the norm of
# the gradient, so computing it raises. The optimizer kernel multiplies gradients by the clip coefficient while reading the
# gradients, which saves a pass over all gradients (8 bytes per element). Any other reader of a `ClippedGradient` triggers the
# multiplication first, with bitwise the same result.


class ShardedGradientError(RuntimeError):
    """A script read a gradient sharded over the ranks."""


_FRAMES_TO_STEP = 24
"""Maximum number of stack frames between an optimizer's operation and its `step`, through torch's wrappers."""


def unprepared_step(holds: Callable[[nn.Parameter], bool]) -> ShardedGradientError | None:
    """Returns the error if an unprepared optimizer holding such a parameter is being stepped; None otherwise.

    A prepared optimizer holds this rank's shards instead of parameters.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_STEP):
        if frame is None:
            return None
        stepped = frame.f_locals.get("self")
        if isinstance(stepped, torch.optim.Optimizer):
            if not any(holds(p) for group in stepped.param_groups for p in group["params"]):
                return None
            name = type(stepped).__name__
            return ShardedGradientError(
                f"hf_zero: {name}.step() reaches parameters that the engine trains, and this {name} was not "
                "prepared. Build the optimizer before accelerator.prepare(model, optimizer), and step the one that "
                "prepare returns."
            )
        frame = frame.f_back
    return None


class GradientState(Enum):
    """HELD: reduced, in the ranks' shards. ZEROED: zeroed by the script. SPENT: used and freed by a step."""

    HELD = "held"
    ZEROED = "zeroed"
    SPENT = "spent"


class ShardedGradient(torch.Tensor):
    """Replaces a gradient sharded over the ranks.

    Attributes:
        pending: autograd's sum since the reduction, not yet reduced; the parameter's shape and dtype.
        shard: the tensor whose `.grad` is this rank's part of the reduced gradient; None if this rank has no part.
        await_shard: waits until the shard's values have arrived.
        state: whether the reduced gradient is held, zeroed or freed.
    """

    pending: torch.Tensor | None
    shard: nn.Parameter | None
    await_shard: Callable[[], None]
    state: GradientState
    _name: str

    __torch_function__ = torch.nn.Parameter.__torch_function__  # dispatches as a plain tensor, at no cost

    @staticmethod
    def __new__(cls, name: str, parameter: torch.Tensor, device: torch.device | None = None) -> "ShardedGradient":
        self = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=device or parameter.device
        )
        self.pending = None
        self.shard = None
        self.await_shard = WeakMethod(None, None)
        self.state = GradientState.HELD
        self._name = name
        return self

    def take_pending(self) -> torch.Tensor | None:
        pending, self.pending = self.pending, None
        return pending

    @property
    def is_spent(self) -> bool:
        """Whether a step has freed the gradient, with no zeroing by the script since."""
        return self.state is GradientState.SPENT

    def become(self, state: GradientState) -> None:
        """Sets the state and drops the pending sum."""
        self.state = state
        self.pending = None

    def refuse_if_spent(self) -> None:
        """Raises `ShardedGradientError` if a second step needs a gradient freed by the first."""
        if self.is_spent:
            raise ShardedGradientError(
                f"hf_zero: the gradient of {self._name!r} is wanted once more after the optimizer.step() that has used it, and "
                "is no longer there. Call optimizer.zero_grad() between a step and the next backward."
            )

    def _zero(self) -> None:
        self.become(GradientState.ZEROED)
        if self.shard is not None and self.shard.grad is not None:
            # Wait first, because a copy under way would overwrite the zeros.
            self.await_shard()
            self.shard.grad.zero_()

    def _add(self, gradient: torch.Tensor) -> None:
        if self.is_spent:
            return
        # Never written in place, because autograd may pass the same tensor to another parameter.
        self.pending = gradient if self.pending is None else self.pending + gradient

    def _moved(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_) -> "ShardedGradient":
        like = torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")
        moved = ShardedGradient(self._name, like, device or self.device)
        moved.state = GradientState.SPENT
        return moved

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument for subclasses that print values
        return f"ShardedGradient({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._unreadable("pickling")

    def _unreadable(self, operation: object) -> ShardedGradientError:
        return unprepared_step(lambda parameter: parameter.grad is self) or ShardedGradientError(
            f"hf_zero: the gradient of {self._name!r} is sharded over the ranks, so {operation} can neither read nor "
            "change it here. Call accelerator.clip_grad_norm_ to clip, engine.full_grad(parameter) to read, "
            "optimizer.zero_grad() to forget; do not wrap in DDP."
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # torch's own is disabled
        if func is torch.ops.aten.detach.default:
            # Returns the stand-in itself: a copy would not notice later zeroing by the script or freeing by a step.
            return args[0]
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls):
            # Autograd accumulates a further backward.
            args[0]._add(args[1])
            return args[0]
        if func is torch.ops.aten.zero_.default:
            # Called by `model.zero_grad(set_to_none=False)`, or by a script's own zeroing.
            args[0]._zero()
            return args[0]
        if func is torch.ops.aten._to_copy.default and args[0].state is GradientState.SPENT:
            # `model.to(...)` also moves gradients. This one has been freed, so only the stand-in moves.
            return args[0]._moved(**kwargs)
        # Any other operation needs values of all ranks. With zeros or None here, a clip would silently be wrong.
        raise next(a for a in leaves((args, kwargs)) if isinstance(a, cls))._unreadable(func)


_NORMS = frozenset(
    {torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm}
)


class NormGuard(Guarded):
    """Guards a shard's reduced gradient in `optimizer.param_groups`: computing its norm raises."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _NORMS:
            raise ShardedGradientError(
                f"hf_zero: `{func.__name__}` of a gradient in optimizer.param_groups is the norm of this rank's part "
                "only. To clip, call accelerator.clip_grad_norm_ or engine.clip_grad_norm_ on all ranks; for a "
                "whole gradient, engine.full_grad(parameter)."
            )
        result = torch.nn.Parameter.__torch_function__(func, types, args, kwargs or {})
        # `grad.detach()` and `grad.data` alias the shard: unguarded, their norm would be mistaken for the gradient's.
        return result.as_subclass(cls) if func in ALIASING else result

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch's takes an argument for printed values
        return repr(self.as_subclass(torch.Tensor))

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a plain tensor: the guard's class is generated with another class's name, and pickle must find a class by
        # its name.
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


_NORM_REFUSED = Guard(NormGuard)

refuse_norms = _NORM_REFUSED.guard
"""Guards gradients against norms."""

allow_norms = _NORM_REFUSED.unguard
"""Removes the guard, for callers that know they handle shards."""


@dataclass(frozen=True, eq=False)
class Coefficient:
    """The factor computed by one call of `clip_grad_norm_`: a float32 scalar tensor not yet read by the host."""

    value: torch.Tensor


class ClippedGradient(torch.Tensor):
    """A shard's reduced gradient, in its own memory, whose clip coefficient is not yet multiplied in.

    Every operation on this tensor, in torch or through an attribute, first multiplies in place. Zeroing `.grad` or assigning
    another tensor drops gradient and coefficient. Only shard tensors that are not parameters get one: autograd adds to a
    parameter's gradient without calling `__torch_function__`.

    Attributes:
        coefficient: the clip coefficient; None once multiplied in, or taken by a kernel.
        behind: the plain gradient in the same memory.
    """

    coefficient: Coefficient | None
    behind: torch.Tensor
    _row: "weakref.ref[torch.Tensor]"
    _product: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(cls, cls._multiplied, (args, kwargs or {}))
            return func(*args, **kwargs)

    @property
    def is_taken(self) -> bool:
        """Whether a kernel has taken the coefficient and multiplies while reading this gradient's memory."""
        return self.coefficient is None and self._product is None

    @torch.no_grad()
    def _multiplied(self) -> torch.Tensor:
        # Cleared first, because the multiplication below is itself an operation on this tensor.
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is not None:
            row = self._row()
            # In place if the dtype loses no digits: a new tensor would need as much memory again as the gradient.
            if row is None or row.dtype == self.dtype:
                self.mul_(coefficient.value)
            else:
                # A bfloat16 product would be rounded, unlike a kernel's. So a product in the shard's wider dtype replaces this
                # gradient.
                self._product = self.to(row.dtype).mul_(coefficient.value)
                # The script may have replaced or dropped the gradient since.
                if row.grad is self:
                    row.grad = self._product
        return self if self._product is None else self._product


_GRAD, _COEFFICIENT, _PRODUCT, _BEHIND = map(attrgetter, ("grad", "coefficient", "_product", "behind"))


def clip_later(rows: Sequence[nn.Parameter], coefficient: Coefficient) -> None:
    """Defers the multiplication to the next readers of the shards' gradients. Loops in C."""
    gradients = list(map(_GRAD, rows))
    clipped = list(map(torch.Tensor.as_subclass, map(torch.Tensor.detach, gradients), repeat(ClippedGradient)))
    set_all(clipped, "coefficient", repeat(coefficient))
    set_all(clipped, "behind", gradients)
    # A weak reference, because the row refers to this gradient: a cycle would keep its memory until Python collects garbage.
    set_all(clipped, "_row", map(weakref.ref, rows))
    set_all(rows, "grad", clipped)


def take_coefficient(row: nn.Parameter) -> Coefficient | None:
    """Takes the pending coefficient of a shard's gradient, which the caller multiplies by; None if there is none."""
    gradient = row.grad
    if not isinstance(gradient, ClippedGradient):
        return None
    coefficient, gradient.coefficient = gradient.coefficient, None
    return coefficient


def take_coefficients(gradients: Sequence[ClippedGradient]) -> list[Coefficient | None]:
    """Takes the pending coefficients of shards' gradients, if all are clipped gradients. Loops in C."""
    found = list(map(_COEFFICIENT, gradients))
    set_all(gradients, "coefficient", repeat(None))
    return found


def taken_gradients(gradients: Sequence[ClippedGradient]) -> list[torch.Tensor] | None:
    """Returns clipped gradients' plain tensors if kernels have taken all their coefficients (`is_taken`); None otherwise."""
    open_or_product = chain(map(_COEFFICIENT, gradients), map(_PRODUCT, gradients))
    return list(map(_BEHIND, gradients)) if all(map(is_, open_or_product, repeat(None))) else None


def coefficient_of_all(gradients: Sequence[Any], behind: Sequence[torch.Tensor]) -> tuple[Coefficient | None] | None:
    """Returns the one coefficient shared by shards' gradients. Loops in C.

    Args:
        gradients: the shards' `.grad`.
        behind: the plain gradients expected in the same memory.

    Returns:
        A tuple with the shared coefficient, `(None,)` if nothing is to be multiplied, or None if the gradients have different
        coefficients, memory or classes.
    """
    if all(map(is_, gradients, behind)):
        return (None,)
    if not {ClippedGradient}.issuperset(map(type, gradients)) or not all(map(is_, map(_BEHIND, gradients), behind)):
        return None
    first = gradients[0].coefficient
    is_one = all(map(is_, map(_COEFFICIENT, gradients), repeat(first)))
    return (first,) if is_one and all(map(is_, map(_PRODUCT, gradients), repeat(None))) else None


def plain_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a shard's gradient as a plain tensor in its own memory, after any pending multiplication."""
    if type(gradient) is torch.Tensor:
        return gradient
    # `detach` would call `__torch_function__` for each parameter, and one such call costs the host as much as ten operations.
    is_taken = isinstance(gradient, ClippedGradient) and gradient.is_taken
    return cast(ClippedGradient, gradient).behind if is_taken else gradient.detach()


def widen(*rows: nn.Parameter) -> None:
    """Converts the gradients of shard tensors to the tensors' dtypes, with the coefficients multiplied in."""
    for row in rows:
        gradient = row.grad
        # Each step checks every shard. A clipped gradient must not be asked for its dtype here, because any access multiplies.
        if gradient is None or (type(gradient) is torch.Tensor and gradient.dtype == row.dtype):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            if gradient.dtype == row.dtype:
                continue
        coefficient = take_coefficient(row)
        with torch.no_grad():
            row.grad = gradient.to(row.dtype)
            if coefficient is not None:
                row.grad.mul_(coefficient.value)


# ---- Parameters while their values are sharded: shape, dtype and gradient are readable, values are not ----
#
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
            return _alias_of(_parameter_behind(args[0]))
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
                _fetch(_parameter_behind(tensor), func)
        return func(*_whole(args), **_whole(kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument for subclasses that print values
        name = _name_of(_parameter_behind(self))
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


def _parameter_behind(tensor: torch.Tensor) -> nn.Parameter:
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
    parameter = _parameter_behind(edited)
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
