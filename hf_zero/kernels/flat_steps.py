"""The common part of the optimizers' kernels: tensors, launches, and the frame around the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..arithmetic.flat import FLOAT_DTYPES, ceil_div, check_flat
from .base import Kernel, check_scalar, is_interpreted, kernel, rounded

if TYPE_CHECKING:
    import triton.language as tl


STEP_BLOCK_NUMEL = 512
NUM_WARPS = 4
"""Four elements for each thread: 16-byte accesses to float32, with at most 40 registers. With eight elements, 16-bit and 32-bit
tensors need different layouts, and the compiler converts between them through shared memory."""


class PreparedLaunch:
    """A kernel with its grid, constants, and the tensors that stay from step to step."""

    def __init__(self, step: Kernel, operands: Operands, states: Sequence[str], constants: dict[str, object]):
        self._numel = operands.weights.numel()
        self._run = step[(ceil_div(self._numel, STEP_BLOCK_NUMEL),)]
        self._weights = operands.weights
        self._others = (*(operands.states.get(name) for name in states), operands.copy)
        self._constants = constants | {
            "BLOCK": STEP_BLOCK_NUMEL,
            "INTERPRETED": is_interpreted(),
            "num_warps": NUM_WARPS,
        }

    def __call__(self, operands: Operands, scalars: Sequence[float]) -> None:
        if self._numel:
            self._run(
                *(
                    self._weights,
                    operands.gradient,
                    *self._others,
                    operands.multiplier,
                    operands.found_inf,
                    self._numel,
                    *scalars,
                ),
                **self._constants,
            )


@dataclass(kw_only=True, slots=True, eq=False)
class Operands:
    """Flat tensors of equal length on one device, which a kernel steps together.

    Attributes:
        weights: the float32 master, or the parameters themselves in float32, bfloat16 or float16.
        gradient: float32, bfloat16 or float16. Not modified.
        states: the optimizer's state by name: float32, or `Coded` for a kernel that steps moments in 8-bit blocks.
        copy: receives the new weights, rounded to the nearest, in one of the three dtypes. None for no copy.
        multiplier: one float32 element by which the gradient is multiplied (MULTIPLIER of `step_scalars`). None for 1.
        found_inf: one float32 element. If it is not 0, nothing is written. None to step always.
        is_checked: an earlier `check` has found that weights, states and copy are valid together.
        is_as_before: all tensors are those of an earlier check, or new ones of the same shape, dtype and device.
        launches: what `launch` has prepared for weights, states and copy of a operands that is stepped again; None for others.
    """

    weights: torch.Tensor
    gradient: torch.Tensor
    states: Mapping[str, Any]
    copy: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    is_checked: bool = False
    is_as_before: bool = False
    launches: dict[tuple[Any, ...], PreparedLaunch] | None = None

    def check(self) -> None:
        """Raises `ValueError` unless the tensors are as described above. States in 8-bit blocks are not checked."""
        if self.is_as_before:
            return
        numel, device = self.weights.numel(), self.weights.device
        check_flat("gradient", self.gradient, numel=numel, device=device, dtypes=FLOAT_DTYPES)
        if not self.is_checked:
            check_flat("weights", self.weights, numel=numel, device=device, dtypes=FLOAT_DTYPES)
            for name, state in self.states.items():
                if isinstance(state, torch.Tensor):
                    check_flat(name, state, numel=numel, device=device, dtypes=[torch.float32])
            if self.copy is not None:
                check_flat("copy", self.copy, numel=numel, device=device, dtypes=FLOAT_DTYPES)
        for name, scalar in (("multiplier", self.multiplier), ("found_inf", self.found_inf)):
            if scalar is not None:
                check_scalar(name, scalar, device)

    @property
    def unscaled_gradient(self) -> torch.Tensor:
        """The gradient in float32 times `multiplier`; the same tensor if that changes nothing."""
        return self.gradient.float() if self.multiplier is None else self.gradient.float() * self.multiplier

    def write(self, weights: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Copies float32 results to weights, states and copy, unless `found_inf` is not 0. The host does not wait."""
        results = [(self.weights, weights), *((self.states[name], value) for name, value in states.items())]
        for target, result in [*results, *([] if self.copy is None else [(self.copy, weights)])]:
            stopped = self.found_inf
            target.copy_(result if stopped is None else torch.where(stopped == 0, result.to(target.dtype), target))


def launch(
    step: Kernel, operands: Operands, states: Sequence[str], scalars: Sequence[float], **constants: object
) -> None:
    """Runs an optimizer's kernel over all elements of `operands`; does nothing if there are none.

    Args:
        states: names of states in the order of the kernel's arguments. The kernel gets None for a missing one.
    """
    kept, key = operands.launches, (step, *constants.values())
    prepared = None if kept is None else kept.get(key)
    if prepared is None:
        prepared = PreparedLaunch(step, operands, states, constants)
        if kept is not None:
            kept[key] = prepared
    prepared(operands, scalars)


@kernel
def own_elements(numel, found_inf, BLOCK: tl.constexpr):
    """Returns this program's offsets and the mask of stepped elements, which is all False if `found_inf` is not 0."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    if found_inf is not None:
        mask = tl.where(tl.load(found_inf) == 0.0, mask, False)
    return offsets, mask


@kernel
def load_gradient(gradient, multiplier, offsets, mask):
    """Returns the gradient in float32, unscaled and clipped."""
    g = tl.load(gradient + offsets, mask=mask).to(tl.float32)
    if multiplier is not None:
        g = g * tl.load(multiplier)
    return g


@kernel
def store_weights(weights, copy, w, offsets, mask, INTERPRETED: tl.constexpr):
    """Stores the new weights, and their copy in its dtype."""
    tl.store(weights + offsets, rounded(w, weights.dtype.element_ty, INTERPRETED), mask=mask)
    if copy is not None:
        tl.store(copy + offsets, rounded(w, copy.dtype.element_ty, INTERPRETED), mask=mask)
