"""Stand-ins for a gradient or a parameter of which this rank holds only a shard."""

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


# ---- Stand-ins in `.grad`: sharded gradients, this rank's rows of one, and clipped rows ----
#
# `ShardedGradient` is `p.grad` once the gradient has been reduced into shards. No rank holds that gradient whole any more.
# With None there, `torch.nn.utils.clip_grad_norm_` and every script that reads `p.grad` would find nothing and go on
# silently; this tensor has the parameter's shape and dtype, holds no memory, and raises when it is read.
#
# The script decides between two backwards. `grad = None`: autograd starts anew. Zeroed: this tensor notes that, and a parameter
# that is not used then is stepped with zeros. Neither: autograd adds, as in gradient accumulation. A step frees the reduced
# gradient. Gradients that come after a step without zeroing are dropped, as those of a discriminator when the generator's loss
# goes through it. A second step without zeroing is refused: its sum would lack the freed gradient.
#
# Rows in the optimizer's groups have gradients, too, between backward and step. Taking the norm of one is a bug: a rank's
# row is not the whole. A kernel multiplies gradients by their clip coefficient as it reads them, which spares a pass over
# all of them, 8 bytes an element. Any other reader of a `ClippedGradient` has it multiplied first, to the same bits.


class ShardedGradientError(RuntimeError):
    """A script read a gradient that is sharded over the ranks."""


_FRAMES_TO_STEP = 24
"""Frames of torch's wrappers between an operation of an optimizer and its `step`."""


def unprepared_step(holds: Callable[[nn.Parameter], bool]) -> ShardedGradientError | None:
    """Returns the error for a running step of an unprepared optimizer that holds such a parameter; None otherwise.

    A prepared optimizer holds this rank's rows in place of parameters.
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
    """A gradient that lies sharded over the ranks.

    Attributes:
        pending: autograd's sum since the reduction, whole and not yet reduced; the parameter's shape and dtype.
        shard: the row with this rank's part of the reduced gradient in its `.grad`; None without a part.
        await_shard: waits for the shard's values.
        state: of the reduced gradient.
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
        """Whether a step has freed the gradient, and the script has not zeroed it since."""
        return self.state is GradientState.SPENT

    def become(self, state: GradientState) -> None:
        """Sets the state, and drops the pending sum."""
        self.state = state
        self.pending = None

    def refuse_if_spent(self) -> None:
        """Raises `ShardedGradientError` for a second step on a gradient that a step has freed."""
        if self.is_spent:
            raise ShardedGradientError(
                f"hf_zero: the gradient of {self._name!r} is wanted once more after the optimizer.step() that has used it, and "
                "is no longer there. Call optimizer.zero_grad() between a step and the next backward."
            )

    def _zero(self) -> None:
        self.become(GradientState.ZEROED)
        if self.shard is not None and self.shard.grad is not None:
            # First: a copy under way would overwrite the zeros.
            self.await_shard()
            self.shard.grad.zero_()

    def _add(self, gradient: torch.Tensor) -> None:
        if self.is_spent:
            return
        # Autograd may hand the same tensor to another parameter: it is not written to.
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
            # The stand-in itself: a copy would not see what a script zeroes or a step frees later.
            return args[0]
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls):
            # Autograd accumulates a further backward.
            args[0]._add(args[1])
            return args[0]
        if func is torch.ops.aten.zero_.default:
            # `model.zero_grad(set_to_none=False)`, or a script that does the same by hand.
            args[0]._zero()
            return args[0]
        if func is torch.ops.aten._to_copy.default and args[0].state is GradientState.SPENT:
            # `model.to(...)` takes gradients along. This one is gone.
            return args[0]._moved(**kwargs)
        # Anything else needs values that no rank has. Zeros or None here would let a clip pass in silence.
        raise next(a for a in leaves((args, kwargs)) if isinstance(a, cls))._unreadable(func)


_NORMS = frozenset(
    {torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm}
)


class RowGradient(Guarded):
    """Guards a row's reduced gradient in `optimizer.param_groups`: taking its norm there raises."""

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
        # `grad.detach()` and `grad.data` are the same row: without the guard, their norm would pass for the gradient's.
        return result.as_subclass(cls) if func in ALIASING else result

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch's takes an argument for printed values
        return repr(self.as_subclass(torch.Tensor))

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a plain tensor: the guard's class has the name of another class, and pickle refuses a class that its name does not
        # lead to.
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


_NORM_REFUSED = Guard(RowGradient)

refuse_norms = _NORM_REFUSED.guard
"""Guards gradients against norms."""

allow_norms = _NORM_REFUSED.unguard
"""Makes them ordinary tensors again, for a caller that knows that they are rows."""


@dataclass(frozen=True, eq=False)
class Coefficient:
    """The factor of one call of `clip_grad_norm_`: a float32 scalar that the host has not read."""

    value: torch.Tensor


class ClippedGradient(torch.Tensor):
    """A row's reduced gradient, in its own memory, with a clip coefficient that is not yet multiplied in.

    Every operation on it, in torch or on one of its attributes, multiplies in place first; zeroing `.grad` or putting another
    tensor there drops both. Only rows that are no parameters have one: autograd adds to a parameter's gradient without an
    operation that torch would show.

    Attributes:
        coefficient: None once it has been multiplied in, or taken.
        behind: the gradient by itself.
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
        """Whether a kernel multiplies what it reads in this gradient's own memory."""
        return self.coefficient is None and self._product is None

    @torch.no_grad()
    def _multiplied(self) -> torch.Tensor:
        # Cleared first: the multiplication below is an operation on this tensor itself.
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is not None:
            row = self._row()
            # In place where no digits are lost: a new tensor would take as much memory again as the row's gradient.
            if row is None or row.dtype == self.dtype:
                self.mul_(coefficient.value)
            else:
                # In bfloat16 the product would be rounded, which a kernel's is not: so a wider one takes this
                # gradient's place.
                self._product = self.to(row.dtype).mul_(coefficient.value)
                # The script may have put another gradient there meanwhile, or none.
                if row.grad is self:
                    row.grad = self._product
        return self if self._product is None else self._product


_GRAD, _COEFFICIENT, _PRODUCT, _BEHIND = map(attrgetter, ("grad", "coefficient", "_product", "behind"))


def clip_later(rows: Sequence[nn.Parameter], coefficient: Coefficient) -> None:
    """Leaves the multiplication to the next readers of the gradients of rows' tensors; in loops in C."""
    gradients = list(map(_GRAD, rows))
    clipped = list(map(torch.Tensor.as_subclass, map(torch.Tensor.detach, gradients), repeat(ClippedGradient)))
    set_all(clipped, "coefficient", repeat(coefficient))
    set_all(clipped, "behind", gradients)
    # A weak reference, because the row refers to this gradient: a cycle would keep its memory until Python collects garbage.
    set_all(clipped, "_row", map(weakref.ref, rows))
    set_all(rows, "grad", clipped)


def take_coefficient(row: nn.Parameter) -> Coefficient | None:
    """Takes the open coefficient of a row's gradient, which the caller multiplies by; None without one."""
    gradient = row.grad
    if not isinstance(gradient, ClippedGradient):
        return None
    coefficient, gradient.coefficient = gradient.coefficient, None
    return coefficient


def take_coefficients(gradients: Sequence[ClippedGradient]) -> list[Coefficient | None]:
    """Takes the open coefficients of rows' gradients, all of which are clipped; in loops in C."""
    found = list(map(_COEFFICIENT, gradients))
    set_all(gradients, "coefficient", repeat(None))
    return found


def taken_gradients(gradients: Sequence[ClippedGradient]) -> list[torch.Tensor] | None:
    """Returns clipped gradients in their own memory if a kernel multiplies all of them (`is_taken`); None otherwise."""
    open_or_product = chain(map(_COEFFICIENT, gradients), map(_PRODUCT, gradients))
    return list(map(_BEHIND, gradients)) if all(map(is_, open_or_product, repeat(None))) else None


def coefficient_of_all(gradients: Sequence[Any], behind: Sequence[torch.Tensor]) -> tuple[Coefficient | None] | None:
    """Returns the coefficient that rows' gradients share; in loops in C.

    Args:
        behind: the gradients in their own memory, which are to be plain or all clipped.

    Returns:
        None in a tuple for gradients that are to be multiplied by nothing; None alone if the gradients are others.
    """
    if all(map(is_, gradients, behind)):
        return (None,)
    if not {ClippedGradient}.issuperset(map(type, gradients)) or not all(map(is_, map(_BEHIND, gradients), behind)):
        return None
    first = gradients[0].coefficient
    is_one = all(map(is_, map(_COEFFICIENT, gradients), repeat(first)))
    return (first,) if is_one and all(map(is_, map(_PRODUCT, gradients), repeat(None))) else None


def plain_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a row's gradient in its own memory and no class of this file; a clipped one is multiplied, if nobody has."""
    if type(gradient) is torch.Tensor:
        return gradient
    # `detach` would call `__torch_function__` for each parameter, which takes the host as long as ten operations.
    is_taken = isinstance(gradient, ClippedGradient) and gradient.is_taken
    return cast(ClippedGradient, gradient).behind if is_taken else gradient.detach()


def widen(*rows: nn.Parameter) -> None:
    """Converts the gradients of rows' tensors to the tensors' dtypes, with the coefficients multiplied in."""
    for row in rows:
        gradient = row.grad
        # Each step asks this of every row. Of a clipped gradient, the question would multiply it.
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


# ---- Parameters while their values are sharded: shape, dtype and gradient can be read, values cannot ----
#
# An ordinary parameter would hand out the NaN that stands in for values which are on other ranks. So while a parameter is
# sharded its class is a subclass of its own class, of which torch asks leave for each operation. Looks go through; reads
# gather the parameter inside a forward or backward, where all ranks come by, and raise everywhere else. An edit of each
# element by itself, such as `clamp_(0, 1)`, needs no other rank's: each edits its shard.

_DATA: Any = torch.Tensor.data

_REPLACING = frozenset({_DATA.__set__, torch.Tensor.set_})

_DIFFERENTIATING = (torch.autograd.backward, torch.autograd.grad)
"""Differentiate with respect to `inputs`, whose values they do not read."""

_SPELLED = {
    "__reduce_ex__": "pickling",
    "__deepcopy__": "copy.deepcopy",
    "__getitem__": "indexing",
    "__setitem__": "indexing",
}


class ShardedParametersError(RuntimeError):
    """An operation that needs whole parameters met sharded ones."""


class ShardedValues(Guarded):
    """Guards a tensor whose values are sharded."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LOOKS:
            return torch.nn.Parameter.__torch_function__(func, types, args, kwargs)
        # An alias may only serve a look at the dtype: its values are refused when they are read.
        if func in ALIASING:
            return _alias_of(_parameter_behind(args[0]))
        if func in EDITS and _edit_own(args[0], func, args[1:], kwargs):
            return args[0]
        # By `==`: Python makes a new `__set__` at each access, so `is` would never hold.
        if func == _DATA.__set__ and isinstance(args[1], ShardedAlias) and args[1]._parameter is args[0]:
            # `p.data *= 2` sets what it has edited.
            return None
        if func in _DIFFERENTIATING:
            # torch passes `inputs` as a tuple, by name to `backward` and by position to `grad`.
            inputs = kwargs.pop("inputs") if "inputs" in kwargs else args[1]
            if any(map(are_hidden, inputs or ())):
                return _differentiate(func, args[0], inputs, kwargs)
            kwargs["inputs"], args = inputs, args[:1]
        for tensor in leaves((args, kwargs)):
            if isinstance(tensor, ShardedValues):
                _fetch(_parameter_behind(tensor), func)
        return func(*_whole(args), **_whole(kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument for subclasses that print values
        name = _name_of(_parameter_behind(self))
        return f"{type(self).__name__}({name}, shape={tuple(self.shape)}, dtype={self.dtype}, on other ranks)"

    def __format__(self, _spec: str) -> str:
        return repr(self)


class ShardedAlias(ShardedValues, torch.Tensor):
    """Stands for `p.data` and `p.detach()` while `p` is sharded. Reading its values counts as reading `p`."""

    _parameter: nn.Parameter


_HIDDEN = Guard(ShardedValues)

hide_all = _HIDDEN.guard
"""Guards parameters, whose values are sharded from now on: torch asks before each operation."""

show_all = _HIDDEN.unguard
"""Makes them ordinary parameters again."""

all_are_hidden = _HIDDEN.are_guarded
"""Whether all parameters are guarded."""


def hide_values(parameter: nn.Parameter) -> None:
    hide_all((parameter,))


def show_values(parameter: nn.Parameter) -> None:
    show_all((parameter,))


def are_hidden(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, ShardedValues)


def unreadable(name: str, operation: str) -> ShardedParametersError:
    """Makes the error for touching values of a sharded parameter outside of a collective place."""
    return ShardedParametersError(
        f"hf_zero: {operation} needs the values of {name}, which is sharded over the ranks (stage 3): no rank has "
        "all of it now. Use `with hf_zero.gathered(model):` on every rank (to edit, `writeback=True`), or "
        "model.state_dict()."
    )


def _parameter_behind(tensor: torch.Tensor) -> nn.Parameter:
    return tensor._parameter if isinstance(tensor, ShardedAlias) else cast(nn.Parameter, tensor)


def _alias_of(parameter: nn.Parameter) -> torch.Tensor:
    with look_only():
        # Without torch's question: this is called by the guard's answer, and would ask without end.
        alias = parameter.detach()
        if not are_hidden(parameter):
            return alias
        alias = alias.as_subclass(ShardedAlias)
    alias._parameter = parameter
    return alias


def _fetch(parameter: nn.Parameter, func: Callable) -> None:
    """Makes a parameter readable for an operation, or raises."""
    engine = engine_attached_to(parameter)
    # An argument before this one may be of the same unit, which is gathered by now.
    if not are_hidden(parameter):
        return
    # New data are refused even in a pass: the next drop points the parameter back at its shard, and the new data would be lost.
    if func in _REPLACING or engine is None or not engine.sharded.gather_in_pass(parameter):
        raise unprepared_step(lambda other: other is parameter) or unreadable(_name_of(parameter), _spelling(func))


def _differentiate(func: Callable, outputs: Any, inputs: Sequence[Any], kwargs: dict) -> Any:
    """Calls torch's `backward` or `grad` with the autograd nodes of sharded inputs, in place of the guarded inputs.

    Not with the guard disabled: the backward that runs inside needs the guard for its own reads.
    """
    named = {**kwargs, "inputs": [_edge_of(each) if are_hidden(each) else each for each in inputs]}
    if not kwargs.get("materialize_grads"):
        return func(outputs, **named)
    # torch has no shape to make zeros of if it is given a node.
    found = func(outputs, **{**named, "materialize_grads": False, "allow_unused": True})
    zeros = partial(torch.zeros_like, requires_grad=kwargs["create_graph"])
    return tuple(zeros(each) if gradient is None else gradient for each, gradient in zip(inputs, found))


def _edge_of(tensor: torch.Tensor) -> Any:
    with look_only():
        # A frozen one has no node. torch's own error names the cause, and is the same for any frozen tensor.
        return get_gradient_edge(tensor) if tensor.requires_grad else torch.empty(0)


def _edit_own(edited: torch.Tensor, func: Callable, args: tuple, kwargs: dict) -> bool:
    """Edits this rank's part of a parameter outside of forward and backward; False if more is needed."""
    parameter = _parameter_behind(edited)
    engine = engine_attached_to(parameter)
    operands = [each for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    # An operand with one value an element would have to be cut as the parameter is. Numbers, in a tensor or not, fit every
    # shard.
    if any(isinstance(each, ShardedValues) or each.dim() > 0 for each in operands):
        return False
    if engine is None or not are_hidden(parameter):
        return False
    if edited is parameter and parameter.requires_grad and torch.is_grad_enabled():
        # torch's own refusal.
        func(torch.empty(0, requires_grad=True), *args, **kwargs)
    return engine.sharded.edit_own(parameter, lambda own: func(own, *args, **kwargs))


def _whole(values: Any) -> Any:
    """Replaces aliases that were taken before a gather by the whole tensors."""
    if isinstance(values, list | tuple):
        whole = [_whole(value) for value in values]
        # A named tuple takes its items as arguments, other lists and tuples take all in one.
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
