"""Stand-ins in `.grad` for gradients stored as shards on the ranks, and guards of these shards."""

import copy
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..hooks.guards import ALIASING, Guard, Guarded
from ..hooks.tensors import is_in_backward, leaves
from ..hooks.weak import WeakMethod

# `ShardedGradient` replaces `p.grad` once the gradient has been reduced into shards, when no rank has the whole gradient any
# more. If `p.grad` were None, `torch.nn.utils.clip_grad_norm_` and scripts that read `p.grad` would silently skip the
# parameter. The stand-in has the parameter's shape and dtype and allocates no memory. Elementwise edits in place (`mul_`,
# `add_`, ...) change this rank's part only, so noise, masks and decay train as under DDP. For any other operation, all ranks
# gather the whole gradient and run the operation. Each rank then stores its part of a changed gradient.
#
# The script decides how two backwards combine. `grad = None`: autograd starts again. Zeroed: the stand-in notes the zeroing,
# and a parameter unused in the next backward is stepped with zeros. Neither: autograd adds, as in gradient accumulation. A
# step frees the reduced gradient. Gradients computed after a step without zeroing are dropped; a discriminator, for example,
# gets such gradients from the generator's loss. A second step without zeroing raises: the sum would lack the freed gradient.


class ShardedGradientError(RuntimeError):
    """A script read a gradient sharded over the ranks."""


class UnpreparedStepError(ShardedGradientError):
    """A script steps an unprepared optimizer."""


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
            return UnpreparedStepError(
                f"hf_zero: {name}.step() would update parameters that the engine trains, but this {name} was not prepared. "
                "Build the optimizer before accelerator.prepare(model, optimizer), and step the one that prepare returns."
            )
        frame = frame.f_back
    return None


class GradientState(Enum):
    """Last event of a reduced gradient.

    Attributes:
        HELD: the reduction; each rank has a shard of the gradient.
        ZEROED: the script has zeroed the gradient.
        SPENT: a step has used the gradient and freed its memory.
    """

    HELD = "held"
    ZEROED = "zeroed"
    SPENT = "spent"


_DATA: Any = torch._C.TensorBase.__dict__["data"]
_EDITS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("add_", "sub_", "mul_", "div_", "neg_", "addcmul_", "addcdiv_", "lerp_", "copy_", "fill_", "masked_fill_"),
        *("clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"),
    )
)
"""Operations in place which compute each element of a gradient from this element and those of the arguments."""
_LIKE = frozenset(
    getattr(torch.ops.aten, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn")
)
"""Operations that read the form of a gradient only, as for noise."""


class _Remote(torch.Tensor):
    """A tensor without memory, whose values are parts of other ranks' memory.

    Attributes:
        stand_in: the gradient that has these values.
    """

    stand_in: "ShardedGradient"

    __torch_function__ = torch.nn.Parameter.__torch_function__  # dispatches as a plain tensor, at no cost

    # torch reads the memory in C for these two.

    def numpy(self, *, force: bool = False) -> Any:
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.clone().tolist()


class ShardedGradient(_Remote):
    """Replaces a gradient sharded over the ranks.

    Attributes:
        pending: autograd's sum since the reduction, not yet reduced; the parameter's shape and dtype.
        shard: the tensor whose `.grad` is this rank's part of the reduced gradient; None if this rank has no part.
        part: the elements of this part in the flat parameter.
        await_shard: waits until the shard's values have arrived.
        gather_whole: gathers the gradient, given this stand-in. Collective.
        state: whether the reduced gradient is held, zeroed or freed.
    """

    pending: torch.Tensor | None
    shard: nn.Parameter | None
    part: slice
    await_shard: Callable[[], None]
    gather_whole: Callable[["ShardedGradient"], torch.Tensor | None]
    state: GradientState
    _name: str

    @staticmethod
    def __new__(cls, name: str, parameter: torch.Tensor, device: torch.device | None = None) -> "ShardedGradient":
        self = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=device or parameter.device
        )
        self.stand_in = self
        self.pending = None
        self.shard, self.part = None, slice(0)
        self.await_shard = self.gather_whole = WeakMethod(None, None)
        self.state = GradientState.HELD
        self._name = name
        return self

    @property  # torch's is an attribute in C
    def data(self) -> torch.Tensor:
        return _DATA.__get__(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if not isinstance(values, ShardedGradient):
            # torch would accept other values, which no step would read.
            raise self.unreadable("setting its `data`")
        _DATA.__set__(self, values)

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
                f"hf_zero: the gradient of {self._name!r} is needed for a second step, but the first optimizer.step() freed "
                "it. Call optimizer.zero_grad() between a step and the next backward."
            )

    def _zero(self) -> None:
        self.become(GradientState.ZEROED)
        if self.shard is not None and self.shard.grad is not None:
            # Wait first, because a copy under way would overwrite the zeros.
            self.await_shard()
            self.shard.grad.zero_()

    def take_shard_of(self, other: "ShardedGradient") -> None:
        """Replaces another stand-in of the same parameter."""
        self.shard, self.part = other.shard, other.part
        self.await_shard, self.gather_whole = other.await_shard, other.gather_whole

    @property
    def _is_complete(self) -> bool:
        """Whether the script may read and edit the reduced gradient: the sum is complete."""
        return self.state is GradientState.HELD and self.pending is None and not is_in_backward()

    def edit(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Runs an operation of elements in place on this rank's part; `args` and `kwargs` come after the gradient itself."""
        if self.shard is None:
            return
        held = self.shard.grad
        if held is None:
            raise self.unreadable(func)

        def cut(value: Any) -> Any:
            if not torch.is_tensor(value) or not value.dim():
                return value
            return value.expand(self.shape).reshape(-1)[self.part].view(held.shape)

        # Wait first, because a copy under way would overwrite the edit.
        self.await_shard()
        # A call of the method, because gradients may be guarded by torch functions.
        getattr(held, func.overloadpacket.__name__)(*map(cut, args), **{name: cut(v) for name, v in kwargs.items()})

    def gathered(self, operation: object) -> torch.Tensor:
        """Gathers the gradient in the parameter's shape and dtype, as under DDP. Collective.

        Raises:
            ShardedGradientError: the gradient is not complete, or an optimizer reads it that was not prepared.
        """
        error = self.unreadable(operation)
        whole = self.gather_whole(self) if self._is_complete and not isinstance(error, UnpreparedStepError) else None
        if whole is None:
            raise error
        return whole.to(self.dtype).contiguous()

    def _add(self, gradient: torch.Tensor) -> None:
        if self.is_spent:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
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
        raise self.unreadable("pickling")

    def unreadable(self, operation: object) -> ShardedGradientError:
        return unprepared_step(lambda parameter: parameter.grad is self) or ShardedGradientError(
            f"hf_zero: the gradient of {self._name!r} is sharded over the ranks, so {operation} cannot read or change it here. "
            "Read it or edit it in place on all ranks, between the last backward and optimizer.step(). Call "
            "accelerator.clip_grad_norm_ to clip it, optimizer.zero_grad() to drop it; do not wrap the model in DDP."
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # torch's own is disabled
        if func is torch.ops.aten.detach.default:
            # Returns the stand-in itself: a copy would not notice later zeroing by the script or freeing by a step.
            return args[0]
        if func is torch.ops.aten.add_.Tensor and _is_by_autograd(*args, **kwargs or {}):
            # Autograd accumulates a further backward. Noise or decay that a script adds to `p.grad` would be lost with the sum.
            args[0]._add(args[1])
            return args[0]
        packet, others = func.overloadpacket, [*args[1:], *kwargs.values()] if kwargs else args[1:]
        if isinstance(args[0], cls) and not any(isinstance(each, cls) for each in leaves(others)):
            if packet in _LIKE:
                like = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
                return func(like, *args[1:], **kwargs or {})
            if packet in _EDITS and args[0]._is_complete:
                args[0].edit(func, args[1:], kwargs or {})
                return args[0]
        if func is torch.ops.aten.zero_.default:
            # Called by `model.zero_grad(set_to_none=False)`, or by a script's own zeroing.
            args[0]._zero()
            return args[0]
        if func is torch.ops.aten._to_copy.default and args[0].state is GradientState.SPENT:
            # `model.to(...)` also moves gradients. This one has been freed, so only the stand-in moves.
            return args[0]._moved(**kwargs)
        # Any other operation needs values of all ranks. With zeros or None here, a clip would silently be wrong.
        return _run_on_whole(func, args, kwargs or {})


def _run_on_whole(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operation of torch with gathered gradients in place of stand-ins and their views.

    Stores this rank's part of the gradients that the operation writes. An operation that returns views gathers nothing.
    """
    written = [each for each in _written(func, args, kwargs) if isinstance(each, _Remote)]
    makes_view = func.is_view
    whole: dict[ShardedGradient, torch.Tensor] = {}
    given_for: dict[int, torch.Tensor] = {}

    def given(value: Any) -> torch.Tensor:
        stand_in = value.stand_in
        if stand_in not in whole:
            whole[stand_in] = torch.empty(stand_in.shape, dtype=stand_in.dtype, device="meta")
            if not makes_view:
                whole[stand_in] = stand_in.gathered(func)
        found = whole[stand_in]
        if value is not stand_in:
            found = found.as_strided(value.shape, value.stride(), value.storage_offset())
        given_for[id(found)] = value
        return found

    # Kept in variables, because an id is unique only as long as its object lives.
    given_args, given_kwargs = tree_map_only(_Remote, given, (args, kwargs))
    result = func(*given_args, **given_kwargs)
    for each in written:
        values = whole[each.stand_in]
        if values.shape != each.stand_in.shape:
            raise each.stand_in.unreadable(func)
        each.stand_in.edit(torch.ops.aten.copy_.default, (values,), {})
    viewed = next(iter(whole))

    def returned(value: torch.Tensor) -> torch.Tensor:
        if id(value) in given_for:
            return given_for[id(value)]
        if not makes_view:
            return value
        if value.dtype != viewed.dtype:
            raise viewed.unreadable(func)
        return GradientView(viewed, value)

    return tree_map_only(torch.Tensor, returned, result)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields the arguments written by an operation of torch: the first one if its name ends with `_`, and outputs."""
    if func.overloadpacket.__name__.endswith("_"):
        yield from leaves(args[0])
    # Tensors in `kwargs` are outputs, with few exceptions. To store these again changes nothing.
    yield from leaves(list(kwargs.values()))


class GradientView(_Remote):
    """A view of a sharded gradient, such as `p.grad[0]` or `p.grad.view(-1)`, without memory.

    Attributes:
        stand_in: the gradient. Each read of the view gathers it.
    """

    @staticmethod
    def __new__(cls, stand_in: ShardedGradient, like: torch.Tensor) -> "GradientView":
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=stand_in.dtype, device=stand_in.device
        )
        self.stand_in = stand_in
        return self

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument for subclasses that print values
        return f"GradientView({self.stand_in!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # torch's own is disabled
        return _run_on_whole(func, args, kwargs or {})


def _is_by_autograd(target: object, added: object, *, alpha: float = 1) -> bool:
    """Whether autograd adds the gradient of a further backward. Otherwise a script edits `p.grad`."""
    return (
        is_in_backward()
        and alpha == 1
        and isinstance(target, ShardedGradient)
        and isinstance(added, torch.Tensor)
        and added.shape == target.shape
    )


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
"""Removes the guard, for callers aware of handling shards."""
