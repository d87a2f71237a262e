"""The norm of sharded gradients, and the clip coefficient that follows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..arithmetic import FLOAT_DTYPES, sums_of_squares, uses_kernels
from ..buckets.bucket import Bucket, Row
from ..comm.ledger import Label
from ..comm.transport import Agreement, Transport
from ..config import ZeroConfig
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
