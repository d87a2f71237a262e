"""Finds the values that determine the update of an element, with many steps of copies of an optimizer on small parameters."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .own_step import double_of, enter_training, own_step, settings_of
from .trial_step import CollectivesRefused, without_collectives


class UpdateScope(Enum):
    """The values that determine the update of an element.

    ELEMENT: only the element itself. PARAMETER: its whole parameter (a norm, a row's mean, a matrix product). MODEL: other
    parameters as well. UNKNOWN: no trial step is possible.
    """

    ELEMENT = "element"
    UNKNOWN = "unknown"
    PARAMETER = "parameter"
    MODEL = "model"

    @property
    def reach(self) -> int:
        """Orders scopes. UNKNOWN in one group must not hide PARAMETER or MODEL of another, for which settings are refused."""
        return list(UpdateScope).index(self)


@dataclass(frozen=True)
class Finding:
    """A scope, and its reason in words."""

    scope: UpdateScope
    reason: str


_SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((7,), (33,), (4352,)),
    2: ((5, 7), (8, 4), (136, 160), (16, 272), (272, 16)),
    3: ((3, 4, 5), (6, 5, 3)),
    4: ((4, 3, 3, 2), (2, 6, 1, 5)),
}
"""Shapes of trial parameters by number of dimensions. Optimizers treat large ones differently: Adafactor factors from 128 rows
and columns on, 8-bit ones keep blocks of 256 from 4,096 elements on, or only if the blocks are full: 4,352 = 17 x 256."""
_SMALL_NUMEL = 100
"""Shapes up to this size are tried first and longest, because a preconditioner of a large shape takes seconds."""
_STEPS = 100
_FIRST_MOVE = 20
"""By this step, an optimizer must have changed its parameters. Some collect ten gradients first."""
_LARGE_STEPS = range(28, 70)
"""Steps of larger shapes, with most of the spikes."""
_STEPS_OF_DTYPE = 24
"""Number of steps in a dtype of the model. The dtype selects a branch of the code; later events are found in float64."""
_LATER = (998, 1_022, 99_998)
_STEPS_LATER = 6
"""All step counters are set to each number of `_LATER`, for this number of steps: a warm-up ends, and so do most intervals."""
_SMOOTH_STEPS = 30
"""In these first steps, gradients have a constant direction, so optimizers that search for a step size find a larger one."""
_SPIKES = {33: 1e3, 47: 1e-5, 48: 1e-5, 61: 1e4, 83: 1e2}
"""Factors of the gradients of single steps, to trigger clipping inside an optimizer."""


def try_optimizer(
    optimizer: torch.optim.Optimizer, settings: dict[str, Any], parameters: Sequence[torch.Tensor]
) -> Finding:
    """Steps copies of an optimizer on parameters together, separately, and cut into flat pieces.

    Equal values mean that the optimizer does not distinguish these cases. The trial runs in float64, in which any dependence
    exceeds the rounding error by far, and for fewer steps in the dtypes of `parameters`. The optimizer, its state and the
    script's random numbers do not change.

    Args:
        settings: the settings of the group.
        parameters: the parameters of the group; only their dtypes and numbers of dimensions count.
    """
    dimensions = {p.dim() for p in parameters} or {2}
    shapes = [shape for count in sorted(dimensions) for shape in _SHAPES.get(count, ((2,) * count, (3,) * count))]
    dtypes = sorted({p.dtype for p in parameters if p.is_floating_point()} or {torch.float32}, key=str)
    trial = _Trial(optimizer, settings)
    found = trial.find(shapes, torch.float64, _STEPS, _LATER)
    if found.scope is UpdateScope.UNKNOWN:
        # Some optimizers do not support float64.
        found = trial.find(shapes, dtypes[0], _STEPS, _LATER)
    for dtype in dtypes:
        if found.scope is UpdateScope.ELEMENT and dtype is not torch.float64:
            found = trial.find(shapes, dtype, _STEPS_OF_DTYPE)
            if found.scope is not UpdateScope.ELEMENT:
                found = Finding(found.scope, f"{found.reason}, in {str(dtype).removeprefix('torch.')}")
    return Finding(
        found.scope, found.reason or f"a trial of {_STEPS + len(_LATER) * _STEPS_LATER} steps found no dependence"
    )


class _Trial:
    """Runs copies of an optimizer next to each other."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any]):
        self._optimizer = optimizer
        self._settings = settings
        self._drawing: Callable[[], AbstractContextManager[object]] = nullcontext

    def find(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, steps: int, later: Sequence[int] = ()
    ) -> Finding:
        """Returns the scope, with an empty reason for ELEMENT."""
        found = self._find(shapes, dtype, steps, later)
        if found is None:
            # The step draws random numbers, which copies must share: otherwise each draw would look like a dependence.
            self._drawing = _EqualDraws
            found = self._find(shapes, dtype, steps, later)
        return found or Finding(UpdateScope.UNKNOWN, "it draws random numbers that no trial can repeat")

    def _find(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, steps: int, later: Sequence[int]
    ) -> Finding | None:
        small = [shape for shape in shapes if torch.Size(shape).numel() <= _SMALL_NUMEL]
        large = [shape for shape in shapes if shape not in small]
        found = self._walk(small, dtype, range(steps), later, cuts=True)
        if found is not None and found.scope is UpdateScope.PARAMETER:
            others = self._walk(small, dtype, range(steps), later, cuts=False)
            return found if others is not None and others.scope is UpdateScope.ELEMENT else others
        if found is not None and found.scope is UpdateScope.ELEMENT and later and large:
            found = self._walk(large, dtype, _LARGE_STEPS, later, cuts=True)
        return found

    def _walk(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, steps: range, later: Sequence[int], *, cuts: bool
    ) -> Finding | None:
        """Steps until two sides differ. Returns None if random numbers may have caused the difference.

        Args:
            steps: see `_Gradients`.
            later: numbers to which step counters are set afterwards.
            cuts: also step flat pieces.
        """
        # Use at least two parameters, because a dependence on other parameters needs another parameter.
        shapes = [*shapes, *shapes] if len(shapes) == 1 else shapes
        generator = torch.Generator().manual_seed(0)
        starts = [_start(shape, number, generator).to(dtype) for number, shape in enumerate(shapes)]
        scripts = [_Gradients(start, number) for number, start in enumerate(starts)]
        jumps = {steps.stop + _STEPS_LATER * number: count for number, count in enumerate(later)}
        # Only guard the whole side, which steps first, because the guard slows each operation down.
        guard = without_collectives()
        with _undisturbed(self._optimizer), self._drawing():
            undrawn = torch.get_rng_state()

            def differs(scope: UpdateScope, reason: str) -> Finding | None:
                drew = self._drawing is nullcontext and not torch.equal(torch.get_rng_state(), undrawn)
                return None if drew else Finding(scope, f"{reason} at step {whole.steps}")

            try:
                whole, *halves = (self._side(starts[first::by]) for first, by in ((0, 1), (0, 2), (1, 2)))
                pieces = self._side([piece for start in starts for piece in _cut(start)]) if cuts else None
                for step in range(steps.start, steps.stop + _STEPS_LATER * len(later)):
                    for side in (whole, *halves, pieces) if step in jumps else ():
                        if side is not None:
                            side.count_from(jumps[step])
                    gradients = [script.of_step(step, p.detach()) for script, p in zip(scripts, whole.parameters)]
                    with guard as seen:
                        whole.step(gradients)
                    if seen is not None and seen.called is not None:
                        # The step has caught the guard's error.
                        return _calls(seen.called)
                    for first, half in enumerate(halves):
                        half.step(gradients[first::2])
                    moves = whole.moves()
                    if step == _FIRST_MOVE and not any(bool(move.any()) for move in moves):
                        # Another object steps instead of this one.
                        return Finding(UpdateScope.UNKNOWN, "a trial changed no parameter")
                    separate = [halves[number % 2].moves()[number // 2] for number in range(len(starts))]
                    if not _same(moves, separate, starts):
                        return differs(UpdateScope.MODEL, "a trial found dependence on other parameters")
                    if pieces is None:
                        continue
                    if not all(bool(move.isfinite().all()) for move in moves):
                        # Later steps could not be compared.
                        return differs(UpdateScope.PARAMETER, "a trial found values that are not finite")
                    if not pieces.can_step([piece for gradient in gradients for piece in _cut(gradient)]):
                        # The optimizer only supports matrices.
                        return differs(UpdateScope.PARAMETER, "a trial could not step parts of parameters")
                    if not _same(list(map(torch.flatten, moves)), _joined(pieces.moves(), starts), starts):
                        return differs(UpdateScope.PARAMETER, "a trial found dependence between elements")
            except Exception as error:
                if isinstance(guard, CollectivesRefused) and guard.called is not None:
                    return _calls(guard.called)
                # The class cannot step without its constructor, so the trial shows nothing about its arithmetic.
                return Finding(UpdateScope.UNKNOWN, f"a trial step failed with {type(error).__name__}")
        return Finding(UpdateScope.ELEMENT, "")

    def _side(self, starts: Sequence[torch.Tensor]) -> "_Side":
        return _Side(self._optimizer, self._settings, starts)


def _calls(collective: str) -> Finding:
    # Ranks step different parameters, so neither their numbers nor their shapes match.
    return Finding(UpdateScope.MODEL, f"its step calls the collective {collective}")


class _Side:
    """A copy of the optimizer with separate trial parameters.

    Attributes:
        steps: the optimizer's number of the last step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], starts: Sequence[torch.Tensor]):
        self.parameters = [nn.Parameter(start.clone()) for start in starts]
        self._starts = starts
        self._double = double_of(optimizer, settings_of(settings) | {"params": list(self.parameters)}, {})
        # Copy these values, because a step may write to them. Do not copy parameters, which would need a model's memory.
        memo = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        for name, value in self._double.__dict__.items():
            is_plain = isinstance(value, list | dict | set | tuple | deque | random.Random) or torch.is_tensor(value)
            if is_plain and name not in ("param_groups", "state"):
                self._double.__dict__[name] = copy.deepcopy(value, memo)
        self._first: dict[tuple[int, str], float] = {}
        self.steps = 0
        enter_training(self._double)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            # Clone, because some optimizers write to gradients.
            parameter.grad = gradient.clone()
        # Make Python's own random numbers equal on all sides, such as a chance to update a preconditioner.
        random.seed(self.steps)
        own_step(self._double)
        self.steps += 1
        if self.steps == 1:
            self._first = {(index, name): float(value) for index, _, name, value in self._numbers()}

    def can_step(self, gradients: Sequence[torch.Tensor]) -> bool:
        try:
            self.step(gradients)
        except Exception:
            return False
        return True

    def count_from(self, count: int) -> None:
        """Continues at this number of steps by moving all numbers increased by one in each step."""
        for index, holder, name, value in list(self._numbers()):
            if value - self._first.get((index, name), value) == self.steps - 1:
                holder[name] = holder[name] + (count - self.steps)
        self.steps = count

    def moves(self) -> list[torch.Tensor]:
        """Returns the change of each parameter since the start."""
        return [p.detach().double() - start.double() for p, start in zip(self.parameters, self._starts)]

    def _numbers(self) -> Iterator[tuple[int, dict[str, Any], str, float]]:
        """Yields (number of the dict, dict, key, value) of plain numbers in attributes, group and state."""
        held = [self._double.__dict__, *self._double.param_groups]
        for index, holder in enumerate([*held, *(self._double.state.get(p, {}) for p in self.parameters)]):
            for name, value in holder.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number or (torch.is_tensor(value) and value.dim() == 0):
                    yield index, holder, name, float(value)


class _EqualDraws(TorchDispatchMode):
    """Draws the same random numbers for equal shapes, in any order and number of calls."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(0)
        return func(*args, **(kwargs or {}))


@contextmanager
def _undisturbed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restores the script's random numbers, and hides its gradients from the trial."""
    # An optimizer made of others steps the script's own parameters, which must have no gradients here.
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    drawn = random.getstate()
    try:
        # Without `devices=[]`, torch would save the state of every accelerator, and make a context on each.
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn)
        for parameter, gradient in held:
            parameter.grad = gradient


def _start(shape: tuple[int, ...], number: int, generator: torch.Generator) -> torch.Tensor:
    # Trust ratios and clips by a norm have limits: some parameters are small, and some large.
    return torch.randn(shape, generator=generator, dtype=torch.float64) * (0.3, 3.0, 0.02)[number % 3]


class _Gradients:
    """Gradients of a trial parameter: unequal in its parts, with spikes, and at every angle to its values."""

    def __init__(self, start: torch.Tensor, number: int):
        self._generator = torch.Generator().manual_seed(100 + number)
        numel = start.numel()
        self._scale = (1.0, 0.05, 20.0, 1e-3)[number % 4]
        # Parts of one parameter differ in norm, mean and sign, so pieces cannot agree by chance.
        self._ramp = torch.logspace(-1, 1, numel, dtype=torch.float64).view(start.shape)
        self._drift = torch.linspace(1.0, -2.0, numel, dtype=torch.float64).view(start.shape) * self._ramp

    def of_step(self, step: int, value: torch.Tensor) -> torch.Tensor:
        wide, limit = value.double(), torch.finfo(value.dtype).max ** 0.5 / 4
        noise = torch.randn(wide.shape, generator=self._generator, dtype=torch.float64)
        gradient = 0.7 * (noise * self._ramp + self._drift)
        square = wide.square().sum().clamp(min=1e-30)
        match step % 10 if step >= _SMOOTH_STEPS else 0:
            case 0:
                gradient = self._drift + 0.1 * noise * self._ramp
            case 6:
                # AdamP projects gradients at a right angle to the weights.
                gradient = gradient - (gradient * wide).sum() / square * wide
            case 7:
                gradient = wide * (gradient.norm() / square.sqrt())
            case 8:
                gradient = -self._drift
            case 9:
                gradient = gradient * (noise > 0)
        # float16 has no squares of large gradients.
        return (gradient * self._scale * _SPIKES.get(step, 1.0)).clamp(-limit, limit).to(value.dtype)


def _cut(whole: torch.Tensor) -> list[torch.Tensor]:
    flat = whole.reshape(-1)
    # Cut inside a block, and cut one small piece off a large parameter.
    at = [flat.numel() * 2 // 5] if flat.numel() <= _SMALL_NUMEL else [247, 247 + (flat.numel() - 247) * 2 // 3]
    return list(flat.tensor_split(at))


def _joined(pieces: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Joins pieces to flat wholes."""
    waiting = iter(pieces)
    return [torch.cat([next(waiting) for _ in _cut(start)]) for start in starts]


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> bool:
    """Whether parameters have moved equally, up to the rounding of their dtype."""
    for one, other, start in zip(some, others, starts, strict=True):
        eps = torch.finfo(start.dtype).eps
        # Vectorized code rounds a few operations in another way. 16-bit values are computed in float32 and rounded once.
        grain = (2 if start.dtype.itemsize == 2 else 16) * eps
        # In float64, any dependence is far above this.
        relative = 1e-9 if start.dtype is torch.float64 else grain
        bound = relative * one.abs() + grain * (start.double().abs().max() + one.abs().max())
        # A NaN on both sides counts as equal here: `_walk` looks for infinite and NaN values.
        if bool(((one - other).abs() > bound).any()):
            return False
    return True
