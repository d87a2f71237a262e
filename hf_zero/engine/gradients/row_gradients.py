"""Gradients in the optimizer's groups between backward and step: a norm of one is asked for by whoever takes it for the whole."""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ...buckets.bucket import Bucket
from ...buckets.sharded_gradient import ShardedGradientError
from ...disguise import named_as

if TYPE_CHECKING:
    # Mixed into a class of tensors: a type checker takes their methods for inherited.
    from torch import Tensor as _TensorBase
else:
    _TensorBase = object

_NORMS = frozenset(
    {torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm}
)

_DATA: Any = torch.Tensor.data
_ALIASING = frozenset({_DATA.__get__, torch.Tensor.detach, torch.detach})


class _NormRefused(_TensorBase):
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
        return result.as_subclass(cls) if func in _ALIASING else result

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch's takes an argument for printed values
        return repr(self.as_subclass(torch.Tensor))

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


RowGradient = named_as(_NormRefused, torch.Tensor)
"""A row's reduced gradient while a script may look at it. Taking its norm raises; all else is as with any tensor."""


def guard_norms(buckets: Iterable[Bucket]) -> None:
    """Makes the gradients of rows that are parts of parameters `RowGradient`s."""
    for bucket in buckets:
        for row in bucket.rows if not bucket.rows_are_parameters else ():
            gradient = row.tensor.grad
            if type(gradient) is torch.Tensor:
                gradient.__class__ = RowGradient


def free_norms(buckets: Iterable[Bucket]) -> None:
    """Makes them ordinary tensors again: whoever asks now knows what they are."""
    for bucket in buckets:
        for row in bucket.rows:
            gradient = row.tensor.grad
            if type(gradient) is RowGradient:
                gradient.__class__ = torch.Tensor
