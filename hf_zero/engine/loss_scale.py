"""Loss scaling over shards: ranks that step together agree on an overflow, in every GradScaler of torch.

A rank only unscales its own rows, and only sees infinite gradients in them. Without an agreement, a scaler would skip the step on
one rank and run the step on the others. The ranks agree while they unscale, so scale, growth and backoff are the same on all
ranks.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from ..buckets.all_buckets import await_gradients
from ..buckets.bucket import BUCKET_OF
from ..buckets.clipped_gradient import widen
from ..hooks.mixins import mix_in
from ..step.sharded_optimizer import engine_stepped_by, sharded_of

if TYPE_CHECKING:
    # This class is mixed into GradScalers, so let type checkers assume their methods.
    from torch.amp import GradScaler as _ScalerBase
else:
    _ScalerBase = object

_stock_unscale = torch.amp.GradScaler._unscale_grads_


def agree_on_overflows() -> None:
    """Makes every `torch.amp.GradScaler` of this process, old or new, agree over ranks on an engine's gradients.

    The class is changed, because an optimizer cannot see its scaler: the scaler only reads `optimizer.param_groups`. Optimizers
    without an engine are unscaled as before.
    """
    stock: Any = torch.amp.GradScaler
    stock._unscale_grads_ = _unscale_rows


def _unscale_rows(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Replaces `GradScaler._unscale_grads_`. Collective if an engine steps the optimizer."""
    sharded, engine = sharded_of(optimizer), engine_stepped_by(optimizer)
    if sharded is None or engine is None:
        return _stock_unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    sharded.refuse_strangers()
    # A running copy would overwrite the unscaled values with scaled ones.
    await_gradients(set(map(BUCKET_OF, sharded.rows)))
    for row in sharded.rows:
        widen(row.tensor)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    scale, clean = inv_scale, found_inf
    if any(gradient.device.type == "cpu" for gradient in gradients):
        # torch would copy these scalars from an accelerator for gradients in host memory, and read the copies without waiting.
        scale, clean = inv_scale.cpu(), found_inf.cpu()
    found = _stock_unscale(scaler, optimizer, scale, clean, allow_fp16)
    # Rows may be in other memory than the scale, and a rank may have no rows.
    mine = sum((part.to(found_inf.device) for part in found.values()), start=found_inf)
    # Agree before the step. A rank sees only overflows in its own shards, and could otherwise step while another rank skips.
    return {found_inf.device: engine.bad_steps.agree(sharded.optimizer, mine)}


class _OverShards(_ScalerBase):
    """The methods of a GradScaler that is updated by accelerate after each of an engine's optimizers.

    [Note: several optimizers]
    accelerate calls `update` after each optimizer. If the scale changed between two optimizers' steps, the second optimizer's
    gradients would be unscaled with another number than their loss was scaled with.
    """

    # A class attribute, because `mix_in` changes the class of an existing scaler, whose `__init__` has already run.
    _is_update_due = False

    def scale(self, outputs):
        if self._is_update_due:
            self._is_update_due = False
            super().update()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._share_state(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any):
        engine = engine_stepped_by(optimizer)
        if engine is not None and self.is_enabled():
            self._share_state(optimizer)
            # Unscale all optimizers at the first step, because the next optimizer's gradients belong to the same scale. See
            # [Note: several optimizers].
            for sharded in engine.optimizers:
                if not self.has_unscaled(sharded.optimizer):
                    self.unscale_(sharded.optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        # torch only creates this register for an enabled scaler.
        stages = [state["stage"] for state in self._per_optimizer_states.values()] if self.is_enabled() else []
        # Wait for the last optimizer, or for the next `scale` if some optimizer does not step this time.
        self._is_update_due = new_scale is None and OptState.UNSCALED in stages
        if not self._is_update_due:
            super().update(new_scale)

    def has_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's gradients were unscaled since the last update, or need no unscaling."""
        if not self.is_enabled():
            return True
        self._share_state(optimizer)
        return self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY

    def _share_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives a wrapper, such as accelerate's, the state of its inner optimizer, so gradients are unscaled only once."""
        sharded = sharded_of(optimizer) if self.is_enabled() else None
        if sharded is not None:
            self._per_optimizer_states[id(optimizer)] = self._per_optimizer_states[id(sharded.optimizer)]


class GradScaler(_OverShards, torch.amp.GradScaler):
    """`torch.amp.GradScaler` for loops that update the scale after each of several optimizers, as accelerate does.

    `torch.amp.GradScaler` itself works as well: with both, an overflow on one rank skips the step on all ranks. Unscaling is
    collective. `state_dict` is a dict of numbers, equal on all ranks.

    Loss scaling: Micikevicius et al., "Mixed Precision Training", 2018.
    """


def scale_over_shards(scaler: torch.amp.GradScaler) -> None:
    """Makes an existing GradScaler work like ours."""
    mix_in(scaler, _OverShards)
