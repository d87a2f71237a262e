"""What the optimizers' kernels share: which tensors they take, and how a reference writes its results."""

from collections.abc import Mapping, Sequence

import torch

from .checks import FLOAT_DTYPES, check_flat, check_scalar

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
