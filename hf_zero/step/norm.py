"""The norm of sharded gradients, the clip coefficient that follows, and steps with NaN or infinite gradients."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..arithmetic.flat import FLOAT_DTYPES, uses_kernels
from ..arithmetic.sums import sums_of_squares
from ..buckets.bucket import Bucket, Row
from ..comm.model_copies import Agreement
from ..comm.transport import Transport
from ..comm.waits import Label
from ..config import ZeroConfig
from ..extras import extra

NORM_LABEL = Label(kind="agreement on the gradient norm", subject="the step")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Scalars on the training device, not read by the host. float32, or float64 if some masters are float64.

    Attributes:
        norm: norm over all ranks.
        coefficient: min(1, max_norm / (norm + 1e-6)), torch's clip coefficient; None if nothing is to be scaled.
        found_inf: 1 if a gradient or the norm is NaN or infinite, else 0; None if this was not computed.
    """

    norm: torch.Tensor
    coefficient: torch.Tensor | None
    found_inf: torch.Tensor | None


class GradientNorm:
    """Measures the norm of a step's gradients with torch operations.

    Args:
        among: the ranks whose gradients add up to the norm.
        device: device of the scalars.
        dtype: dtype of the scalars.
        counted: names of the parameters whose gradients count on this rank, for a split model, in which several ranks have the
            same gradient. None if every gradient counts.
    """

    def __init__(
        self,
        among: Transport | Agreement,
        *,
        device: torch.device,
        dtype: torch.dtype,
        counted: frozenset[str] | None = None,
    ):
        self.among = among
        self.device = device
        self._dtype = dtype
        self._counted = counted

    def measure(self, rows: Sequence[Row], *, norm_type: float, max_norm: float) -> Measured:
        """Measures the norm of the whole gradient from all ranks' rows, as torch.nn.utils.get_total_norm does under DDP.

        Collective.

        Args:
            rows: this rank's rows. Rows without a gradient are ignored.
            norm_type: p of the p-norm; inf for the largest magnitude.
            max_norm: gradients with a larger norm are to be scaled; inf only measures.
        """
        counted = self._counted
        return self._measure(
            rows if counted is None else [row for row in rows if row.slot.name in counted], norm_type, max_norm
        )

    def _measure(self, rows: Sequence[Row], norm_type: float, max_norm: float) -> Measured:
        norm = self._norm([row.tensor.grad for row in rows if row.tensor.grad is not None], norm_type).to(self._dtype)
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return Measured(norm=norm, coefficient=coefficient, found_inf=None)

    def _norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Returns the norm over all ranks. The sum over the ranks is in float64."""
        device = self.device
        if math.isinf(norm_type):
            # `max` of a tensor without elements raises.
            largest = _each_on(device, [g for g in gradients if g.numel()], _largest)
            mine = largest.max() if largest.numel() else torch.zeros((), dtype=torch.float64, device=device)
            # A rank without gradients sends 0, because the other ranks wait for its value.
            return self.among.agree_largest(mine)
        mine = _each_on(device, gradients, partial(_sums_of_powers, norm_type=norm_type)).sum()
        return self.among.agree_sum(mine.reshape(1), NORM_LABEL)[0].pow(1.0 / norm_type)


def choose_norm(
    config: ZeroConfig,
    buckets: Sequence[Bucket],
    among: Transport | Agreement,
    *,
    device: torch.device,
    counted: frozenset[str] | None,
) -> GradientNorm:
    """Returns the norm by kernels if they run on the device and support all gradient dtypes. `counted`: see `GradientNorm`."""
    dtypes = {bucket.precision.master for bucket in buckets}
    digits = torch.float64 if torch.float64 in dtypes else torch.float32
    by_kernels = uses_kernels(config.kernels, device) and dtypes <= set(FLOAT_DTYPES)
    kind = extra("kernels", "NormByKernels") if by_kernels else GradientNorm
    return kind(among, device=device, dtype=digits, counted=counted)


def _each_on(
    device: torch.device, gradients: Sequence[torch.Tensor], measure: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """Measures each gradient; returns (n,) float64 on `device`, in order.

    Args:
        measure: measures gradients of one device, on this device. So offloaded gradients are measured in host memory.
    """
    memories = {gradient.device for gradient in gradients}
    if len(memories) == 1:
        return measure(gradients).to(device)
    found = torch.zeros(len(gradients), dtype=torch.float64, device=device)
    for memory in memories:
        indices = [index for index, gradient in enumerate(gradients) if gradient.device == memory]
        found[indices] = measure([gradients[index] for index in indices]).to(device)
    return found


def _largest(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.abs().max().double() for gradient in gradients])


def _sums_of_powers(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if norm_type == 2:
        return sums_of_squares(gradients)
    # At least float32: in 16 bits, powers overflow, and long sums stop growing.
    dtypes = (torch.promote_types(gradient.dtype, torch.float32) for gradient in gradients)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype).double() for g, dtype in zip(gradients, dtypes)]
    return torch.stack(norms).pow(norm_type)
