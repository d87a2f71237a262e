"""What the optimizers' kernels share: which tensors they take, how they are launched, and what they do around the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from .checks import FLOAT_DTYPES, check_flat, check_scalar
from .lazy import Kernel, ceil_div, is_interpreted, kernel
from .rounding import rounded

if TYPE_CHECKING:
    import triton.language as tl

BLOCK_NUMEL = 512
NUM_WARPS = 4
"""Four elements a thread: 16-byte accesses to float32 in at most 40 registers. With eight, 16-bit and 32-bit tensors want
different layouts and the compiler converts between them through shared memory."""


def check_step_tensors(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    states: Mapping[str, torch.Tensor | None],
    copy: torch.Tensor | None,
    scalars: Mapping[str, torch.Tensor | None],
) -> None:
    """Raises `ValueError` unless all are flat, of one length, on one device, states in float32 and scalars one float32."""
    numel, device = weights.numel(), weights.device
    check_flat("weights", weights, numel=numel, device=device, dtypes=FLOAT_DTYPES)
    check_flat("gradient", gradient, numel=numel, device=device, dtypes=FLOAT_DTYPES)
    for name, state in states.items():
        if state is not None:
            check_flat(name, state, numel=numel, device=device, dtypes=[torch.float32])
    if copy is not None:
        check_flat("copy", copy, numel=numel, device=device, dtypes=FLOAT_DTYPES)
    for name, scalar in scalars.items():
        if scalar is not None:
            check_scalar(name, scalar, device)


def unscaled(gradient: torch.Tensor, multiplier: torch.Tensor | None) -> torch.Tensor:
    """The gradient in float32, times `multiplier`; a new tensor where either changes anything."""
    return gradient.float() if multiplier is None else gradient.float() * multiplier


def write(results: Sequence[tuple[torch.Tensor | None, torch.Tensor]], found_inf: torch.Tensor | None) -> None:
    """Copies each float32 result to its place, if it has one, unless `found_inf` is not 0; never asks the host."""
    for place, result in results:
        if place is None:
            continue
        place.copy_(result if found_inf is None else torch.where(found_inf == 0, result.to(place.dtype), place))


def launch(step: Kernel, tensors: Sequence[torch.Tensor | None], scalars: Sequence[float], **constants: object) -> None:
    """Runs an optimizer's kernel over all elements of `tensors[0]`, the weights; nothing where there are none."""
    numel = cast(torch.Tensor, tensors[0]).numel()
    if numel:
        grid = (ceil_div(numel, BLOCK_NUMEL),)
        constants |= {"BLOCK": BLOCK_NUMEL, "INTERPRETED": is_interpreted(), "num_warps": NUM_WARPS}
        step[grid](*tensors, numel, *scalars, **constants)


@kernel
def own_elements(numel, found_inf, BLOCK: tl.constexpr):
    """This program's offsets, and which of them are stepped: none where `found_inf` is not 0."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    if found_inf is not None:
        mask = tl.where(tl.load(found_inf) == 0.0, mask, False)
    return offsets, mask


@kernel
def load_gradient(gradient, multiplier, offsets, mask):
    """The gradient in float32, unscaled and clipped."""
    g = tl.load(gradient + offsets, mask=mask).to(tl.float32)
    if multiplier is not None:
        g = g * tl.load(multiplier)
    return g


@kernel
def store_weights(weights, copy, w, offsets, mask, INTERPRETED: tl.constexpr):
    """The new weights to their place and, in its dtype, to the copy."""
    tl.store(weights + offsets, rounded(w, weights.dtype.element_ty, INTERPRETED), mask=mask)
    if copy is not None:
        tl.store(copy + offsets, rounded(w, copy.dtype.element_ty, INTERPRETED), mask=mask)
