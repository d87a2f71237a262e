"""Loss scaling over shards: torch's GradScaler, with ranks that agree on an overflow.

A rank unscales the rows that it owns and sees an infinite gradient in those alone, so torch's own scaler would skip the step
on one rank and take it on the others. Here the ranks agree first; scale, growth and backoff are then the same on all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState
from torch.autograd.graph import increment_version

from ..buckets.sharded import widen
from ..hooks import mix_in
from .sharded_optimizer import SCALES_ITSELF, engine_stepped_by

if TYPE_CHECKING:
    # Mixed into GradScalers: a type checker takes their methods for inherited.
    from torch.amp import GradScaler as _ScalerBase
else:
    _ScalerBase = object


class _OverShards(_ScalerBase):
    """The methods of a GradScaler that know engines. Optimizers without an engine are treated as ever.

    [Note: several optimizers]
    accelerate calls `update` after each optimizer. A scale that changes between two optimizers' steps would unscale the second
    one's gradients by another number than their loss was scaled with.
    """

    # Of the class: `mix_in` changes the class of a scaler that exists, whose `__init__` has run.
    _is_update_due = False

    def scale(self, outputs):
        if self._is_update_due:
            self._is_update_due = False
            super().update()
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any):
        engine = engine_stepped_by(optimizer)
        if engine is None or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        # All at the first step: the next optimizer's gradients belong to the same scale. See [Note: several
        # optimizers].
        for sharded in engine.optimizers:
            if self._per_optimizer_states[id(sharded.optimizer)]["stage"] is OptState.READY:
                self.unscale_(sharded.optimizer)
        with _unscaled_here(optimizer):
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        # torch makes the register of a scaler that is enabled only.
        stages = [state["stage"] for state in self._per_optimizer_states.values()] if self.is_enabled() else []
        # Waits for the last optimizer, or for the next `scale` if one does not step this time.
        self._is_update_due = new_scale is None and OptState.UNSCALED in stages
        if not self._is_update_due:
            super().update(new_scale)

    def has_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's gradients have been unscaled since the last update, or need not be."""
        return not self.is_enabled() or self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        engine = engine_stepped_by(optimizer)
        if engine is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for sharded in engine.optimizers:
            if sharded.optimizer is optimizer:
                sharded.refuse_strangers()
                for row in sharded.rows:
                    # A copy under way would put the scaled values over the unscaled ones.
                    row.slot.bucket.await_gradient()
                    widen(row.tensor)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        scale, clean = inv_scale, found_inf
        if any(gradient.device.type == "cpu" for gradient in gradients):
            # torch copies them from an accelerator to gradients in host memory, and does not wait before it reads the copies.
            scale, clean = inv_scale.cpu(), found_inf.cpu()
        found = super()._unscale_grads_(optimizer, scale, clean, allow_fp16)
        # torch does not count this as an edit, and a step that was begun with the scaled gradients would be kept.
        increment_version(gradients)
        # Rows may be in other memory than the scale, and a rank may have none.
        mine = sum((part.to(found_inf.device) for part in found.values()), start=found_inf)
        # Agreement before the step: a rank sees overflows of its own rows only, and would step while another skips.
        return {found_inf.device: engine.bad_steps.agree(optimizer, mine)}


class GradScaler(_OverShards, torch.amp.GradScaler):
    """`torch.amp.GradScaler` for optimizers of a `ZeroEngine` (and others): an overflow on one rank skips the step on all ranks.

    Use it as torch's: `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)` before a clip, `scaler.step(optimizer)`,
    `scaler.update()`. Unscaling is collective. `state_dict` is a dict of numbers, the same on all ranks.

    Loss scaling: Micikevicius et al., "Mixed Precision Training", 2018.
    """


def scale_over_shards(scaler: torch.amp.GradScaler) -> None:
    """Makes a GradScaler that others hold already do as ours does."""
    mix_in(scaler, _OverShards)


@contextmanager
def _unscaled_here(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hides the optimizer's offer to unscale and skip by itself: torch would call its step even after an overflow."""
    setattr(optimizer, SCALES_ITSELF, False)
    try:
        yield
    finally:
        setattr(optimizer, SCALES_ITSELF, True)
