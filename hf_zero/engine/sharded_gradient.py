"""What stands in `p.grad` once a gradient has been reduced into its shard.

No rank holds that gradient whole any more. With None there, `torch.nn.utils.clip_grad_norm_` and every script that
reads `p.grad` would find nothing and go on silently; this stand-in has the parameter's shape and dtype, holds no memory,
and raises when it is read. It also tells the engine whether the script zeroed the gradient before the next backward
(autograd then finds None there) or goes on accumulating (autograd then adds to the stand-in).
"""

import torch

from .nested import leaves


class ShardedGradientError(RuntimeError):
    """A script read a gradient that is sharded over the ranks."""


class ShardedGradient(torch.Tensor):
    """A gradient that lies sharded over the ranks.

    Attributes:
        pending: what autograd has added since the reduction, whole and not yet reduced; the parameter's shape and dtype.
    """

    pending: torch.Tensor | None
    _name: str

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, name: str, parameter: torch.Tensor) -> "ShardedGradient":
        self = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self.pending = None
        self._name = name
        return self

    def take_pending(self) -> torch.Tensor | None:
        pending, self.pending = self.pending, None
        return pending

    def __repr__(self) -> str:
        return f"ShardedGradient({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls):
            # Autograd accumulates a further backward.
            held, gradient = args[0], args[1]
            held.pending = gradient if held.pending is None else held.pending.add_(gradient)
            return held
        name = next(a._name for a in leaves((args, kwargs)) if isinstance(a, cls))
        raise ShardedGradientError(
            f"hf_zero: the gradient of {name!r} is sharded over the ranks, so {func} can neither read nor change it here. To "
            "clip, call accelerator.clip_grad_norm_ or engine.clip_grad_norm_ (not torch.nn.utils.clip_grad_norm_); to look at "
            "it, call engine.full_grad(parameter) on all ranks; to forget it, optimizer.zero_grad(). The model is not to be "
            "wrapped in DistributedDataParallel as well."
        )
