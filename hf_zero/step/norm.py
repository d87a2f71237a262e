"""The norm of sharded gradients, the clip coefficient that follows, and steps with NaN or infinite gradients."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..arithmetic.flat import FLOAT_DTYPES, uses_kernels
from ..arithmetic.sums import sums_of_squares
from ..buckets.bucket import Bucket, Row
from ..comm.ledger import Label
from ..comm.model_copies import Agreement
from ..comm.transport import Transport
from ..config import ZeroConfig
from ..device import HostValue
from ..extras import extra

NORM_LABEL = Label(kind="agreement on the gradient norm", subject="the step")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Scalars on the training device, which the host has not read: float32, or float64 where gradients are.

    Attributes:
        norm: over all ranks.
        coefficient: min(1, max_norm / (norm + 1e-6)), torch's clip coefficient; None where nothing is to be scaled.
        found_inf: 1 where a gradient or the norm is NaN or infinite, else 0; None where nobody has counted.
    """

    norm: torch.Tensor
    coefficient: torch.Tensor | None
    found_inf: torch.Tensor | None


class GradientNorm:
    """Measures the gradients of a step, by a few of torch's operations for all rows together, and a few for each long one.

    Args:
        device: where the scalars go.
        dtype: of the scalars.
        counts: of a model that is split over ranks, whether this rank is the one on which a row's gradient counts that several
            ranks of a copy have; None where each has its own.
    """

    def __init__(
        self,
        among: Transport | Agreement,
        *,
        device: torch.device,
        dtype: torch.dtype,
        counts: Callable[[Row], bool] | None = None,
    ):
        self.among = among
        self.device = device
        self._dtype = dtype
        self._counts = counts

    def measure(self, rows: Sequence[Row], *, norm_type: float, max_norm: float) -> Measured:
        """Measures the norm of the whole gradient from all ranks' rows, as torch.nn.utils.get_total_norm does under DDP.

        Collective.

        Args:
            rows: of which this rank takes the gradients; ones without a gradient count nothing.
            norm_type: p of the p-norm; inf for the largest magnitude.
            max_norm: above which gradients are to be scaled; inf only measures.
        """
        return self._measure(rows if self._counts is None else list(filter(self._counts, rows)), norm_type, max_norm)

    def _measure(self, rows: Sequence[Row], norm_type: float, max_norm: float) -> Measured:
        norm = self._norm([row.tensor.grad for row in rows if row.tensor.grad is not None], norm_type).to(self._dtype)
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return Measured(norm=norm, coefficient=coefficient, found_inf=None)

    def _norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The sum over ranks travels as float64."""
        device = self.device
        if math.isinf(norm_type):
            # `max` of a tensor without elements raises.
            largest = _each_on(device, [g for g in gradients if g.numel()], _largest)
            mine = largest.max() if largest.numel() else torch.zeros((), dtype=torch.float64, device=device)
            # A rank without gradients comes with 0: the others wait for its answer.
            return self.among.agree_largest(mine)
        mine = _each_on(device, gradients, partial(_sums_of_powers, norm_type=norm_type)).sum()
        return self.among.agree_sum(mine.reshape(1), NORM_LABEL)[0].pow(1.0 / norm_type)


def choose_norm(
    config: ZeroConfig,
    buckets: Sequence[Bucket],
    among: Transport | Agreement,
    *,
    device: torch.device,
    counts: Callable[[Row], bool] | None,
) -> GradientNorm:
    """By kernels where they run and take the dtypes of all gradients. `counts`: see `GradientNorm`."""
    dtypes = {bucket.precision.master for bucket in buckets}
    digits = torch.float64 if torch.float64 in dtypes else torch.float32
    by_kernels = uses_kernels(config.kernels, device) and dtypes <= set(FLOAT_DTYPES)
    kind = extra("kernels", "NormByKernels") if by_kernels else GradientNorm
    return kind(among, device=device, dtype=digits, counts=counts)


def _each_on(
    device: torch.device, gradients: Sequence[torch.Tensor], measure: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """Measures each gradient, float64, in order, on `device`.

    Args:
        measure: of gradients on one device, where the result is too: those in host memory are measured there.
    """
    memories = {gradient.device for gradient in gradients}
    if len(memories) == 1:
        return measure(gradients).to(device)
    found = torch.zeros(len(gradients), dtype=torch.float64, device=device)
    for memory in memories:
        places = [place for place, gradient in enumerate(gradients) if gradient.device == memory]
        found[places] = measure([gradients[place] for place in places]).to(device)
    return found


def _largest(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.abs().max().double() for gradient in gradients])


def _sums_of_powers(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if norm_type == 2:
        return sums_of_squares(gradients)
    # In float32 at least: powers of 16-bit gradients overflow, and their sums stand still.
    dtypes = (torch.promote_types(gradient.dtype, torch.float32) for gradient in gradients)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype).double() for g, dtype in zip(gradients, dtypes)]
    return torch.stack(norms).pow(norm_type)


# ---- Finds NaN and infinite gradients, stops or skips their step, and names the batch ----

_log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 10
"""Bad steps that are left out one behind the other before a run ends all the same: its model has most often diverged."""

_OVERFLOW = Label(kind="agreement on overflow", subject="the step")


class NonFiniteGradientError(FloatingPointError):
    """A gradient has a NaN or infinite element; the parameters have not been touched."""


class NonFiniteCheck:
    """Looks at each step's gradient norm, and stops the run or skips the step where the norm is not finite, by `nonfinite`.

    On the host the norm is at hand. On an accelerator reading it would stop the device's queue, so with `nonfinite: stop` a
    step's norm is read at the next step; the run still ends one step later with the same message. Until then `found_inf` holds
    kernels back from writing. A step that is to be skipped has to be known as such before it: then the norm is read at once.
    Gradients that a loss scaler has unscaled are its own affair: it skips the step, and the run goes on.

    The ranks find the same norm, and so come to the same answers.

    Args:
        model: whose parameters an error names.
        config: with `nonfinite`.
        among: the ranks with a share of the gradients.
        transport: of the ranks that step together.
        speaks: whether this rank tells of skipped steps.

    Attributes:
        found_inf: one float32 element on the training device, 1 where the gradients that were looked at last are not finite,
            else 0; None where nobody has looked that way, or the step is to be taken whatever they are.
        skipped: steps that were not taken.
        was_skipped: whether the last step was not taken.
        skips: whether the step that is about to be taken is to be skipped.
        has_skipped: whether another optimizer of this engine has come to the same step, and skipped it.
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
        # Of the step's micro-batches until now, where the model returns one; the host has not waited for them.
        self._losses: list[torch.Tensor | None] = []

    def agree(self, optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> torch.Tensor:
        """Whether a loss scaler found a NaN or infinite gradient of this optimizer on any rank. Collective.

        Args:
            found_inf: float32 scalar, above 0 where this rank has one.

        Returns:
            1.0 or 0.0 in a float32 scalar, the same on all ranks.
        """
        self._unscaled.add(optimizer)
        # The scaler decides about this step: kernels must not be held back by a look at earlier gradients.
        self.found_inf = None
        return (self._among.agree_sum(found_inf.reshape(1), _OVERFLOW)[0] > 0).float()

    def is_due(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether nobody has looked at the gradients that the optimizer is about to step with."""
        return self._wanted and not self._has_looked and optimizer not in self._unscaled

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the step is sure to come: the next one's gradients are others."""
        self._has_looked = False
        self._unscaled.discard(optimizer)

    def forget(self) -> None:
        """Called behind each backward: the gradients are others."""
        self._has_looked = self.skips = self.has_skipped = False

    def look(self, measured: Measured, *, at_all: bool) -> float | None:
        """Returns a NaN or infinite norm, the same on all ranks; None for a finite one.

        Args:
            at_all: these are all gradients.
        """
        self._has_looked = at_all
        self.found_inf = None
        if not self._wanted or self._unscaled:
            return None
        # Kernels read this on the device, and leave the parameters of a bad step unchanged.
        self.found_inf = measured.found_inf
        value = HostValue(measured.norm.detach())
        # On an accelerator a read stops the queue: with `stop`, the norm is read at the next step. A skip must be known
        # before its step.
        at_once = self._may_skip or measured.norm.device.type == "cpu"
        last, self._last = (value, None) if at_once else (self._last, value)
        return None if last is None or math.isfinite(last.value()) else last.value()

    def refuse_unscaled(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Raises `RuntimeError` for a step over float16 parameters without a loss scaler."""
        if optimizer in self._unscaled or not any(bucket.precision.param == torch.float16 for bucket in buckets):
            return
        raise RuntimeError(
            "hf_zero: optimizer.step() over float16 parameters without loss scaling: most small gradients are 0 in "
            "float16. Train through accelerate or Trainer, use torch.amp.GradScaler, or train in bfloat16."
        )

    def found(self, norm: float, rows: Sequence[Row]) -> None:
        """Called when the gradients of the coming step have a norm that is not finite. Collective.

        Args:
            rows: this rank's, with their gradients.

        Raises:
            NonFiniteGradientError: the run is to end.
        """
        if not self._may_skip:
            raise NonFiniteGradientError(
                f"hf_zero: the gradient norm is {norm}: a gradient is NaN or infinite, so this step is refused. "
                f"{self._where_from(rows)}Lower the learning rate, or mend the data; `nonfinite: skip` leaves such steps out, "
                "`nonfinite: ignore` takes them."
            )
        if self.skips:
            # Measured again, after a clip of some of the parameters.
            return
        self.skips = True
        self._in_a_row += 1
        # Collective: on all ranks, also those that do not print.
        where = self._where_from(rows)
        if self._in_a_row > _MOST_IN_A_ROW:
            raise NonFiniteGradientError(
                f"hf_zero: the gradient norm is {norm}, and {_MOST_IN_A_ROW} bad steps in a row have been left out "
                f"before. {where}Resume from a checkpoint with a lower learning rate, or without "
                "the data that causes this."
            )
        # The 1st, 2nd, 4th, 8th...: a run with thousands of them is not to drown in them.
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
        """Called in a step that is skipped, when its gradients have been dropped."""
        self.skipped += 1
        self.was_skipped = self.has_skipped = True

    def end_step(self, *, is_taken: bool) -> None:
        """Called behind each step, and each that was skipped."""
        self.forget_batches()
        if is_taken:
            self.was_skipped = False
            self._in_a_row = 0

    # ---- which micro-batches the step had, to name the one that brought a gradient that is not finite ----

    def note_batch(self, outputs: object) -> None:
        """Keeps the loss, where the model returns one, behind each forward that trains."""
        found = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
        if found is None and isinstance(outputs, Mapping):
            found = outputs.get("loss")
        is_loss = isinstance(found, torch.Tensor) and found.numel() == 1
        # Detached: the loss's graph would keep the micro-batch's activations until the step.
        self._losses.append(found.detach() if is_loss and isinstance(found, torch.Tensor) else None)

    def forget_batches(self) -> None:
        """The micro-batches until now are none of this step's."""
        self._losses.clear()

    def _where_from(self, rows: Sequence[Row]) -> str:
        """Where a gradient that is not finite comes from, in sentences; the same on all ranks. Collective."""
        place_of = {name: place for place, (name, _) in enumerate(self._model.named_parameters())}
        mine = [r.slot.name for r in rows if r.tensor.grad is not None and not torch.isfinite(r.tensor.grad).all()]
        bad_losses = [
            (micro + 1, loss.item())
            for micro, loss in enumerate(self._losses)
            if loss is not None and not torch.isfinite(loss)
        ]
        known = sum(loss is not None for loss in self._losses)
        rank = dist.get_rank() if dist.is_initialized() else 0
        everyone = self._transport.exchange((rank, mine, bad_losses, known))
        # Backward goes from the last parameter to the first: what is wrong in a layer is wrong in all those before it.
        names = sorted({name for _, theirs, _, _ in everyone for name in theirs}, key=lambda n: -place_of.get(n, 0))
        return f"{_of_parameters(names)}{self._of_batches(everyone)}"

    def _of_batches(self, everyone: Sequence[tuple[int, list[str], list[tuple[int, float]], int]]) -> str:
        count = max(len(self._losses), 1)
        step = f"It is step {self._transport.watch.log.step + 1} since the engine was built"
        for rank, _, bad, _ in everyone:
            if bad:
                micro, loss = bad[0]
                of = f", micro-batch {micro} of {count}" if count > 1 else ""
                return f"{step}{of} on rank {rank}: its loss is {loss}. "
        if all(known for _, _, _, known in everyone):
            return f"{step}; the losses that the model returned in it are finite on all ranks. "
        return f"{step}. "


def _of_parameters(names: Sequence[str]) -> str:
    """
    Args:
        names: in the order of backward.
    """
    if not names:
        return ""
    unit, _, _ = names[0].rpartition(".")
    more = f", and {len(names) - 1} more behind it" if len(names) > 1 else ""
    return f"First parameters in backward: {', '.join(names[:3])} (in {unit or 'the model itself'}{more}). "
