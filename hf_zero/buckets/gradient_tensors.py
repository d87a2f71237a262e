"""Tensors that stand in `.grad` and are not what they seem: sharded ones, this rank's rows of one, and clipped ones.

`ShardedGradient` is `p.grad` once the gradient has been reduced into shards. No rank holds that gradient whole any more. With
None there, `torch.nn.utils.clip_grad_norm_` and every script that reads `p.grad` would find nothing and go on silently; this
tensor has the parameter's shape and dtype, holds no memory, and raises when it is read.

It also tells the engine what the script does with the gradient before the next backward. Where it was set to None, autograd
finds None. Where it was zeroed, this tensor has seen that: a parameter that is not used then has a gradient of zeros, with
which it is stepped. Otherwise autograd adds to it, as in gradient accumulation. The step gives the reduced gradient
back. What comes after it without zeroing is dropped, as by a script that zeroes it before it steps again: a discriminator's,
when the generator's loss goes through it. A step without zeroing is refused: the sum would lack what the script left there.

Rows in the optimizer's groups have gradients, too, between backward and step. A norm of one is asked for by whoever takes it
for the whole, and is refused. A kernel multiplies gradients by their clip coefficient as it reads them, which spares a pass
over all of them, 8 bytes an element. Whoever else reads one (`ClippedGradient`) has it multiplied first, to the same bits.
"""

import copy
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..disguise import ALIASING, Disguise, Disguised
from ..hooks import WeakHook
from .nested import leaves


class ShardedGradientError(RuntimeError):
    """A script read a gradient that is sharded over the ranks."""


_FRAMES_TO_STEP = 24
"""Between an operation of an optimizer's and its `step` lie torch's own wrappers."""


def unprepared_step(holds: Callable[[nn.Parameter], bool]) -> ShardedGradientError | None:
    """The error where an optimizer that holds such a parameter is stepping; None where none is.

    An optimizer that is prepared holds this rank's rows in place of parameters.
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
                f"hf_zero: {name}.step() reaches parameters that the engine trains, and this {name} was not prepared. Build the "
                "optimizer before accelerator.prepare(model, optimizer), and step the one that prepare returns."
            )
        frame = frame.f_back
    return None


class GradientState(Enum):
    """HELD: the ranks have it in their shards. ZEROED: the script has zeroed it. SPENT: a step was taken, and gave it back."""

    HELD = "held"
    ZEROED = "zeroed"
    SPENT = "spent"


class ShardedGradient(torch.Tensor):
    """A gradient that lies sharded over the ranks.

    Attributes:
        pending: what autograd has added since the reduction, whole and not yet reduced; the parameter's shape and dtype.
        shard: what has this rank's part of the reduced gradient in its `.grad`; None where the rank has no part.
        await_shard: returns when the shard's values, which may be on their way, are there.
        state: what has become of the reduced gradient.
    """

    pending: torch.Tensor | None
    shard: nn.Parameter | None
    await_shard: Callable[[], None]
    state: GradientState
    _name: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own Parameter has it

    @staticmethod
    def __new__(cls, name: str, parameter: torch.Tensor, device: torch.device | None = None) -> "ShardedGradient":
        self = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=device or parameter.device
        )
        self.pending = None
        self.shard = None
        self.await_shard = WeakHook(None, None)
        self.state = GradientState.HELD
        self._name = name
        return self

    def take_pending(self) -> torch.Tensor | None:
        pending, self.pending = self.pending, None
        return pending

    @property
    def is_spent(self) -> bool:
        """Whether a step has given it back, and the script has not zeroed it since."""
        return self.state is GradientState.SPENT

    def become(self, state: GradientState) -> None:
        """Notes what has become of the gradient, and with it of what autograd has added."""
        self.state = state
        self.pending = None

    def refuse_if_spent(self) -> None:
        """Raises `ShardedGradientError` where the gradient is wanted once more after the step that has given it back."""
        if self.is_spent:
            raise ShardedGradientError(
                f"hf_zero: the gradient of {self._name!r} is wanted once more after the optimizer.step() that has used it, and "
                "is no longer there. Call optimizer.zero_grad() between a step and the next backward."
            )

    def _zero(self) -> None:
        self.become(GradientState.ZEROED)
        if self.shard is not None and self.shard.grad is not None:
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
            f"hf_zero: the gradient of {self._name!r} is sharded over the ranks, so {operation} can neither read nor change it "
            "here. To clip, call accelerator.clip_grad_norm_ or engine.clip_grad_norm_ (not torch.nn.utils.clip_grad_norm_); to "
            "look at it, call engine.full_grad(parameter) on all ranks; to forget it, optimizer.zero_grad(). The model is not to "
            "be wrapped in DistributedDataParallel as well."
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # torch's own is disabled
        if func is torch.ops.aten.detach.default:
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
        raise next(a for a in leaves((args, kwargs)) if isinstance(a, cls))._unreadable(func)


_NORMS = frozenset(
    {torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm}
)


class RowGradient(Disguised):
    """Mixed into the class of a row's reduced gradient while a script may look at it: taking its norm raises."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _NORMS:
            raise ShardedGradientError(
                f"hf_zero: `{func.__name__}` of a gradient in optimizer.param_groups, which holds this rank's part of each "
                "parameter, is the norm of that part: torch.nn.utils.clip_grad_norm_ over a group would clip by another number "
                "on each rank. To clip, call accelerator.clip_grad_norm_(model.parameters(), ...) or "
                "engine.clip_grad_norm_(max_norm, parameters=...) on all ranks; to look at a whole gradient, "
                "engine.full_grad(parameter)."
            )
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        return result.as_subclass(cls) if func in ALIASING else result

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch's takes an argument for printed values
        return repr(self.as_subclass(torch.Tensor))

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


_NORM_REFUSED = Disguise(RowGradient)

refuse_norms = _NORM_REFUSED.put_on
"""Makes gradients `RowGradient`s."""

allow_norms = _NORM_REFUSED.take_off
"""Makes them ordinary tensors again: whoever asks now knows what they are."""


@dataclass(frozen=True, eq=False)
class Coefficient:
    """What one call of `clip_grad_norm_` multiplies by: a float32 scalar that the host has not read."""

    value: torch.Tensor


class ClippedGradient(torch.Tensor):
    """A row's reduced gradient, in its own memory, and what it is still to be multiplied by.

    Every operation on it, in torch or on one of its attributes, multiplies in place first; zeroing `.grad` or putting another
    tensor there drops both. It stands in rows that are no parameters: autograd adds to a parameter's gradient where no
    operation is seen. Who has kept the tensor that was in `.grad` before the clip sees there what has been multiplied so far.

    In bfloat16 the product would be rounded, as a kernel's is not. There it is made beside, in the row's own dtype, takes this
    one's place in `.grad`, and is what the operation sees.

    Attributes:
        coefficient: None once it has been multiplied in, or taken.
    """

    coefficient: Coefficient | None
    _row: "weakref.ref[torch.Tensor]"
    _product: torch.Tensor | None

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, coefficient: Coefficient, row: torch.Tensor) -> "ClippedGradient":
        self = torch.Tensor._make_subclass(cls, gradient.detach())
        self.coefficient = coefficient
        self._row = weakref.ref(row)
        self._product = None
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(cls, cls._multiplied, (args, kwargs or {}))
            return func(*args, **kwargs)

    @torch.no_grad()
    def _multiplied(self) -> torch.Tensor:
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is not None:
            row = self._row()
            if row is None or row.dtype == self.dtype:
                self.mul_(coefficient.value)
            else:
                self._product = self.to(row.dtype).mul_(coefficient.value)
                if row.grad is self:
                    row.grad = self._product
        return self if self._product is None else self._product


def clip_later(row: nn.Parameter, coefficient: Coefficient) -> None:
    """Leaves it to who reads the gradient of a row's tensor to multiply it."""
    if isinstance(row.grad, ClippedGradient):
        widen(row)
    row.grad = ClippedGradient(cast(torch.Tensor, row.grad), coefficient, row)


def take_coefficient(row: nn.Parameter) -> Coefficient | None:
    """What the gradient of a row's tensor is still to be multiplied by, which the caller sees to; None where nothing is."""
    gradient = row.grad
    if not isinstance(gradient, ClippedGradient):
        return None
    coefficient, gradient.coefficient = gradient.coefficient, None
    return coefficient


def widen(row: nn.Parameter) -> None:
    """Has the gradient of a row's tensor in all digits of that, multiplied by what it is to be."""
    gradient = row.grad
    # Each step asks this of every row. Of a clipped gradient, the question would multiply it.
    if gradient is None or (type(gradient) is torch.Tensor and gradient.dtype == row.dtype):
        return
    with torch._C.DisableTorchFunctionSubclass():
        if gradient.dtype == row.dtype:
            return
    coefficient = take_coefficient(row)
    with torch.no_grad():
        row.grad = gradient.to(row.dtype)
        if coefficient is not None:
            row.grad.mul_(coefficient.value)
