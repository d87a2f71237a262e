"""Finds NaN and infinite gradients, stops or skips their step, and names the batch."""

import logging
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from ..buckets.bucket import Bucket, Row
from ..comm.model_copies import Agreement
from ..comm.transport import Transport
from ..comm.waits import Label
from ..config import ZeroConfig
from ..queues import HostValue
from .nonfinite_source import where_from
from .norm import Measured

_log = logging.getLogger(__name__)
_PARAM_DTYPE = attrgetter("precision.param")

_MOST_IN_A_ROW = 10
"""Consecutive skipped steps before the run ends nevertheless, because the model has most likely diverged."""

_OVERFLOW = Label(kind="agreement on overflow", subject="the step")


class NonFiniteGradientError(FloatingPointError):
    """A gradient has a NaN or infinite element; the parameters have not been touched."""


class NonFiniteCheck:
    """Checks each step's gradient norm. If the norm is not finite, ends the run or skips the step, as `nonfinite` says.

    On the CPU the norm is read at once. On an accelerator, a read would stall the device's queue. So with `nonfinite: stop` a
    step's norm is read at the next step, and the run ends one step later with the same message. Until then `found_inf` keeps
    kernels from writing. With `nonfinite: skip` the norm is read before the step. If a loss scaler has unscaled the gradients,
    nothing is checked here: the scaler itself skips bad steps.

    All ranks compute the same norm, so their decisions are the same.

    Args:
        model: the model with the parameters' names, for errors.
        config: the config with `nonfinite`.
        among: the ranks with a part of the gradients.
        transport: connects the ranks that step together.
        speaks: whether this rank logs skipped steps.

    Attributes:
        found_inf: one float32 element on the training device, 1 if the last checked gradients are not finite, else 0. None if
            kernels did not count, or if the step is to run in any case.
        skipped: number of skipped steps.
        was_skipped: whether the last step was skipped.
        skips: whether the coming step is to be skipped.
        has_skipped: whether another optimizer of this engine has already skipped the same step.
    """

    def __init__(
        self, model: nn.Module, config: ZeroConfig, among: Transport | Agreement, transport: Transport, *, speaks: bool
    ):
        self._model = model
        self._among = among
        self._transport = transport
        self._speaks = speaks
        self._wanted = config.nonfinite != "ignore"
        self._may_skip = config.nonfinite == "skip"
        self._last: HostValue | None = None
        self._has_looked = False
        self._unscaled: set[torch.optim.Optimizer] = set()
        self.found_inf: torch.Tensor | None = None
        self._in_a_row = 0
        self.skipped = 0
        self.was_skipped = self.skips = self.has_skipped = False
        # The losses of the step's micro-batches so far, None if the model returned no loss. The host has not waited for them.
        self._losses: list[torch.Tensor | None] = []

    def agree(self, optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> torch.Tensor:
        """Whether a loss scaler found a NaN or infinite gradient of this optimizer on any rank. Collective.

        Args:
            found_inf: float32 scalar, above 0 if this rank has such a gradient.

        Returns:
            1.0 or 0.0 in a float32 scalar, the same on all ranks.
        """
        self._unscaled.add(optimizer)
        # The scaler decides about this step, so a check of earlier gradients must not keep kernels from writing.
        self.found_inf = None
        return (self._among.agree_sum(found_inf.reshape(1), _OVERFLOW)[0] > 0).float()

    def is_due(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of the optimizer's coming step are still unchecked."""
        return self._wanted and not self._has_looked and optimizer not in self._unscaled

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the step is certain to run, because the next step needs a new check."""
        self._has_looked = False
        self._unscaled.discard(optimizer)

    def forget(self) -> None:
        """Called after each backward, because new gradients need a new check."""
        self._has_looked = self.skips = self.has_skipped = False

    def look(self, measured: Measured, *, at_all: bool) -> float | None:
        """Returns a NaN or infinite norm, the same on all ranks; None for a finite one.

        Args:
            at_all: whether these are all gradients.
        """
        self._has_looked = at_all
        self.found_inf = None
        if not self._wanted or self._unscaled:
            return None
        # Kernels read this value on the device, and do not change parameters in a bad step.
        self.found_inf = measured.found_inf
        value = HostValue(measured.norm.detach())
        # On an accelerator a read stalls the queue, so with `stop` the norm is read at the next step. A skip must be decided
        # before the step.
        at_once = self._may_skip or measured.norm.device.type == "cpu"
        last, self._last = (value, None) if at_once else (self._last, value)
        return None if last is None or math.isfinite(last.value()) else last.value()

    def refuse_unscaled(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Raises `RuntimeError` for a step over float16 parameters without a loss scaler."""
        if optimizer in self._unscaled or torch.float16 not in map(_PARAM_DTYPE, buckets):
            return
        raise RuntimeError(
            "hf_zero: optimizer.step() over float16 parameters without loss scaling: most small gradients are 0 in "
            "float16. Train through accelerate or Trainer, use torch.amp.GradScaler, or train in bfloat16."
        )

    def found(self, norm: float, rows: Sequence[Row]) -> None:
        """Called if the gradient norm of the coming step is not finite. Collective.

        Args:
            rows: this rank's rows with their gradients.

        Raises:
            NonFiniteGradientError: the run is to end.
        """
        source = self._model, self._transport, self._losses
        if not self._may_skip:
            raise NonFiniteGradientError(
                f"hf_zero: the gradient norm is {norm}: a gradient is NaN or infinite, so this step is refused. "
                f"{where_from(*source, rows)}Lower the learning rate, or fix the data; `nonfinite: skip` skips such steps, "
                "`nonfinite: ignore` applies them."
            )
        if self.skips:
            # A second clip in the same step has measured the norm again.
            return
        self.skips = True
        self._in_a_row += 1
        # Collective, so all ranks call this, even the ranks that do not log.
        where = where_from(*source, rows)
        if self._in_a_row > _MOST_IN_A_ROW:
            raise NonFiniteGradientError(
                f"hf_zero: the gradient norm is {norm}, and {_MOST_IN_A_ROW} bad steps in a row were skipped before. "
                f"{where}Resume from a checkpoint with a lower learning rate, or without the data that causes this."
            )
        # Log the 1st, 2nd, 4th, 8th... skipped step, because a run may skip thousands.
        count = self.skipped + 1
        if self._speaks and count & (count - 1) == 0:
            _log.warning(
                "hf_zero: the gradient norm is %s: this step is skipped and its gradients are dropped (`nonfinite: skip`; %d so "
                "far). %s",
                norm,
                count,
                where,
            )

    def skip(self) -> None:
        """Called in a skipped step, after its gradients have been dropped."""
        self.skipped += 1
        self.was_skipped = self.has_skipped = True

    def end_step(self, *, is_taken: bool) -> None:
        """Called after each step, including skipped steps."""
        self.forget_batches()
        if is_taken:
            self.was_skipped = False
            self._in_a_row = 0

    # ---- losses of the step's micro-batches, to name the one with a NaN or infinite loss ----

    def note_batch(self, outputs: object) -> None:
        """Keeps the loss of a training forward, or None if the model returns no loss."""
        found = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
        if found is None and isinstance(outputs, Mapping):
            found = outputs.get("loss")
        is_loss = isinstance(found, torch.Tensor) and found.numel() == 1
        # Detached, because the graph of the loss would keep the micro-batch's activations until the step.
        self._losses.append(found.detach() if is_loss and isinstance(found, torch.Tensor) else None)

    def forget_batches(self) -> None:
        """Drops the losses noted so far, which belong to no future step."""
        self._losses.clear()
