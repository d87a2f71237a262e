"""Recordings of two runs, the tolerances between them, and the report of their differences."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..arithmetic.flat import uses_kernels
from ..config import ZeroConfig
from ..config.checks import SpelledError

# ---- Files of a recorded run: losses by rank, gradients and parameters by step ----

Tensors = Mapping[str, torch.Tensor | None]
"""Parameter name → whole tensor in host memory; None if there is no gradient."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run which decide whether another run can have the same bits.

    Attributes:
        config: the engine's settings; None for a run without the engine.
        dtypes: dtypes of the trained parameters.
        device: type of the device.
        optimizer: class of the optimizer.
        order: names of the trained parameters, in the order of the model.
    """

    world_size: int
    config: dict[str, Any] | None
    dtypes: list[str]
    device: str
    optimizer: str
    order: list[str]


class Recording:
    """Reads the files of a `Recorder`.

    Args:
        every: number of ranks that compute a sequence together; the losses of the first one are read.
    """

    def __init__(self, folder: Path, *, every: int = 1):
        self._folder = folder
        traces = sorted(folder.glob("trace-*.pt"), key=lambda path: int(path.stem.removeprefix("trace-")))
        self._traces = [torch.load(path, weights_only=True) for path in traces[::every]]

    @property
    def facts(self) -> Facts | None:
        """Returns the run's facts; None without an optimizer step."""
        path = self._folder / "facts.json"
        return Facts(**json.loads(path.read_text())) if path.is_file() else None

    @property
    def losses(self) -> list[list[list[float]]]:
        """Returns the losses by rank, step and micro-batch."""
        return [trace["losses"] for trace in self._traces]

    @property
    def norms(self) -> list[float | None]:
        """Returns the result of clipping in each step; None without a clip."""
        return self._traces[0]["norms"] if self._traces else []

    @property
    def steps(self) -> int:
        """Number of completely recorded optimizer steps."""
        return len(self.norms)

    def start(self) -> Tensors:
        """Parameters before the first step."""
        return self._load("start")

    def gradients(self, step: int) -> Tensors:
        """Returns the optimizer's gradients in a step."""
        return self._load(f"gradients-{step}")

    def parameters(self, step: int) -> Tensors:
        return self._load(f"parameters-{step}")

    def _load(self, name: str) -> Tensors:
        return torch.load(self._folder / f"{name}.pt", weights_only=True, mmap=True)


def write_tensors(folder: Path, name: str, tensors: Tensors) -> None:
    torch.save(dict(tensors), folder / f"{name}.pt")


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / "facts.json").write_text(json.dumps(dataclasses.asdict(facts)))


def write_trace(folder: Path, rank: int, trace: Mapping[str, list]) -> None:
    torch.save(dict(trace), folder / f"trace-{rank}.pt")


# ---- Whether a run with the engine must have DDP's bits, and otherwise the tolerance ----

ROUNDING = 1e-3
"""Tolerance for sums in a different order."""

HALF_DIGITS = 5e-2
"""Tolerance for parameters or gradients in 16 bits."""

INEXACT = 0.25
"""Tolerance for settings that trade exactness for memory or traffic."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason why two runs need not have the same bits.

    Attributes:
        tolerance: relative difference that is expected for this reason.
    """

    text: str
    tolerance: float

    def __str__(self) -> str:
        return self.text


def reasons_of(stock: Recording, engine: Recording) -> list[Reason]:
    """Lists the reasons why bits may differ from DDP's; none if the two runs must be bitwise equal."""
    facts = engine.facts
    if facts is None or facts.config is None:
        return []
    config = ZeroConfig.from_dict(facts.config)
    return [*_of_the_run(facts, config, stock), *_of_settings(facts, config)]


def _of_the_run(facts: Facts, config: ZeroConfig, stock: Recording) -> Iterator[Reason]:
    accumulation = max((len(step) for step in stock.losses[0]), default=1) if stock.losses else 1
    if stock.facts is not None and stock.facts.world_size != facts.world_size:
        yield Reason(
            text=(
                f"{facts.world_size // stock.facts.world_size} ranks compute a sequence: its tokens are added in a different "
                "order"
            ),
            tolerance=ROUNDING,
        )
    if facts.world_size > 2:
        yield Reason(
            text=f"{facts.world_size} ranks: gradients of more than two are added in a different order",
            tolerance=ROUNDING,
        )
    if facts.world_size > 1 and accumulation > 1 and not config.accumulates_locally:
        yield Reason(
            text=(
                f"`grad_accumulation: sharded` reduces each of {accumulation} micro-batches; DDP adds the micro-batches first "
                "(so does `grad_accumulation: local`)"
            ),
            tolerance=ROUNDING,
        )
    if any(norm is not None for norm in stock.norms):
        yield Reason(
            text="gradients were clipped by a norm that adds its squares in a different order", tolerance=ROUNDING
        )
    sixteen = [dtype for dtype in facts.dtypes if dtype in ("bfloat16", "float16")]
    if sixteen:
        yield Reason(
            text=f"{' and '.join(sixteen)} parameters are stepped through a float32 master, while DDP steps them directly",
            tolerance=HALF_DIGITS,
        )
    if facts.device != "cpu":
        yield Reason(
            text=f"operations on {facts.device} may add in a different order each time (torch.use_deterministic_algorithms)",
            tolerance=ROUNDING,
        )


def _of_settings(facts: Facts, config: ZeroConfig) -> Iterator[Reason]:
    comm, offload = config.comm, config.offload
    for name, value in (("param_dtype", config.param_dtype), ("reduce_dtype", config.reduce_dtype)):
        if value not in ("auto", "float32"):
            yield Reason(text=f"`{name}: {value}`", tolerance=HALF_DIGITS)
    if config.gather_dtype == "bfloat16":
        yield Reason(text="`gather_dtype: bfloat16` computes with rounded parameters", tolerance=HALF_DIGITS)
    if uses_kernels(config.kernels, torch.device(facts.device)):
        yield Reason(text=f"`kernels: {config.kernels}` adds in a different order than torch", tolerance=ROUNDING)
    if offload.moves_state and facts.device != "cpu":
        yield Reason(
            text=f"`offload.optimizer: {offload.optimizer}` may step on the host, which rounds differently",
            tolerance=ROUNDING,
        )
    inexact: dict[str, tuple[str | int, str | int]] = {
        "moments": (config.moments, "32bit"),
        "rounding": (config.rounding, "nearest"),
        "comm.weights": (comm.weights, "none"),
        "comm.gradients": (comm.gradients, "none"),
        "comm.sync_every": (comm.sync_every, 1),
    }
    for name, (chosen, exact) in inexact.items():
        if chosen != exact:
            yield Reason(text=f"`{name}: {chosen}` is not exact", tolerance=INEXACT)


# ---- Compares two recorded runs step by step: the size of differences, and the first difference ----

_FLOOR = 1e-3
"""Gradients are judged relative to the parameter's largest, but at least to this part of the model's largest, or the tolerance.
Gradients that should be zero consist of rounding errors only (for example, of the bias of attention keys)."""


class ParityError(SpelledError, RuntimeError):
    """Raised if two runs cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between two runs.

    Attributes:
        step: number of the optimizer step, from 0. The first one may have started with different parameters.
        kind: "start", "loss", "gradient", "norm" or "parameter", in the order of events in a step.
        where: name of a parameter, or a rank and micro-batch.
        largest: magnitude of the largest difference.
        relative: the relative difference, which is compared with the tolerance; the docs define its reference.
        others: number of further differences of this kind beyond the tolerance in this step.
    """

    step: int
    kind: str
    where: str
    largest: float
    relative: float
    others: int = 0

    def __str__(self) -> str:
        place = f"{self.where}" + (f" and {self.others} more" if self.others else "")
        return f"step {self.step}, {self.kind} of {place}: {self.largest:.3g} ({self.relative:.1e} relative)"


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The result of comparing a run with the engine to the same run without the engine.

    Attributes:
        steps: number of compared optimizer steps.
        reasons: why bits may differ; empty if they must not.
        tolerance: relative difference that is expected; 0 requires equal bits.
        equal: whether all bits are equal.
        passed: whether no difference is beyond the tolerance.
        first: the first difference beyond the tolerance, otherwise the first difference; None if all bits are equal.
        loss, norm: the largest differences of a loss and of a gradient norm.
        gradients, parameters: by name, the largest differences of an element in any step.
        repeats: whether a second run without the engine has the same bits; None if this was not tried.
    """

    world_size: int
    steps: int
    reasons: list[str]
    tolerance: float
    equal: bool
    passed: bool
    first: Difference | None
    loss: float
    norm: float
    gradients: dict[str, float] = field(repr=False)
    parameters: dict[str, float] = field(repr=False)
    repeats: bool | None = None

    @property
    def bitwise_expected(self) -> bool:
        """Whether the two runs must be equal bit for bit."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """Converts the report for JSON, with texts for NaN and infinities."""
        return _plain(dataclasses.asdict(self) | {"bitwise_expected": self.bitwise_expected})

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Returns the report as sentences, the verdict first."""
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        over = f"{self.steps} optimizer steps on {ranks}"
        if self.equal:
            verdict = f"equal bit for bit over {over}"
        elif self.passed:
            verdict = f"equal within {self.tolerance:g} over {over}, as expected"
        else:
            verdict = f"NOT equal over {over}"
        lines = [f"hf_zero parity: {verdict}."]
        if self.first is not None:
            lines.append(f"First difference: {self.first}.")
        if not self.equal:
            lines.append(
                f"Largest differences: loss {self.loss:.3g}, gradient norm {self.norm:.3g}, gradient "
                f"{_worst(self.gradients)}, parameter {_worst(self.parameters)}."
            )
        if self.repeats is False:
            lines.append(
                "Two runs without the engine differ: random numbers are not seeded, or operations add in a different order "
                "each time."
            )
        if self.reasons:
            lines.append(f"Equal bits are not expected: {'; '.join(self.reasons)}.")
        else:
            lines.append("Equal bits are expected: this set-up adds and rounds as DDP does.")
        return lines


def compare(stock: Recording, engine: Recording, tolerance: float | None = None) -> ParityReport:
    """Compares a run without the engine to one with the engine.

    Args:
        tolerance: relative difference that passes; None uses the tolerance that is expected for the set-up.

    Raises:
        ParityError: the runs cannot be compared: no steps, or different parameters or numbers of steps or ranks.
    """
    _refuse_unlike(stock, engine)
    reasons = reasons_of(stock, engine)
    allowed = max((r.tolerance for r in reasons), default=0.0) if tolerance is None else tolerance
    found = list(_differences(stock, engine, allowed))
    beyond = [difference for difference in found if not difference.relative <= allowed]
    first = next(iter(beyond or found), None)
    if first is not None:
        alike = [d for d in (beyond or found) if (d.step, d.kind) == (first.step, first.kind)]
        first = dataclasses.replace(first, others=len(alike) - 1)
    return ParityReport(
        world_size=len(stock.losses),
        steps=stock.steps,
        reasons=[str(reason) for reason in reasons],
        tolerance=allowed,
        equal=not found,
        passed=not beyond,
        first=first,
        loss=_most(found, "loss"),
        norm=_most(found, "norm"),
        gradients=_by_name(found, "gradient"),
        parameters=_by_name(found, "parameter", "start"),
    )


def repeats(stock: Recording, again: Recording) -> bool:
    """Whether two runs without the engine had the same bits."""
    alike = stock.facts is not None and stock.facts == again.facts and stock.steps == again.steps
    return alike and not any(_differences(stock, again, 0.0))


def _refuse_unlike(stock: Recording, engine: Recording) -> None:
    if stock.facts is None or engine.facts is None or not stock.steps or not engine.steps:
        which = "run without the engine" if stock.facts is None or not stock.steps else "run with the engine"
        raise ParityError(f"hf_zero parity: the {which} took no optimizer step, so there is nothing to compare.")
    if stock.facts.config is not None:
        raise ParityError(
            "hf_zero parity: the run without hf_zero has an engine. Remove `--zero`, ZeroPlugin and HF_ZERO_CONFIG from the "
            "script and its arguments: parity adds the engine itself."
        )
    if engine.facts.config is None:
        raise ParityError("hf_zero parity: the run with hf_zero has no engine on its optimizer.")
    if set(stock.facts.order) != set(engine.facts.order):
        odd = sorted(set(stock.facts.order) ^ set(engine.facts.order))
        raise ParityError(
            f"hf_zero parity: the two runs train different parameters: {len(odd)} are in only one of them (first: {odd[0]!r})."
        )
    shapes = [(len(r.losses), [[len(step) for step in rank[: r.steps]] for rank in r.losses]) for r in (stock, engine)]
    if stock.steps != engine.steps or shapes[0] != shapes[1]:
        raise ParityError(
            f"hf_zero parity: the runs took different steps: {stock.steps} and {engine.steps} optimizer steps, with "
            f"{shapes[0][1]} and {shapes[1][1]} backwards in each step by rank. Seed the script, and stop it by steps, not "
            "by its loss."
        )


def _differences(stock: Recording, engine: Recording, allowed: float) -> Iterator[Difference]:
    """Yields all differences in the order of time. Gradients are in the order of backward."""
    order = list(stock.facts.order) if stock.facts is not None else []
    before = stock.start()
    yield from _of_tensors(0, "start", before, engine.start(), order, allowed)
    for step in range(stock.steps):
        for rank, (mine, theirs) in enumerate(zip(stock.losses, engine.losses)):
            for micro, (a, b) in enumerate(zip(mine[step], theirs[step])):
                where = f"rank {rank}" + (f", micro-batch {micro}" if len(mine[step]) > 1 else "")
                yield from _of_numbers(step, "loss", where, a, b)
        gradients = stock.gradients(step)
        yield from _of_tensors(step, "gradient", gradients, engine.gradients(step), order[::-1], allowed)
        yield from _of_numbers(step, "norm", "all gradients", stock.norms[step], engine.norms[step])
        after = stock.parameters(step)
        unjudged = _unjudged(gradients, allowed)
        for difference in _of_tensors(step, "parameter", after, engine.parameters(step), order, allowed, before):
            yield dataclasses.replace(difference, relative=0.0) if difference.where in unjudged else difference
        before = after


def _of_numbers(step: int, kind: str, where: str, a: float | None, b: float | None) -> Iterator[Difference]:
    if a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b)):
        return
    if a is None or b is None:
        yield Difference(step=step, kind=kind, where=where, largest=math.inf, relative=math.inf)
        return
    largest = _finite(abs(a - b))
    yield Difference(step=step, kind=kind, where=where, largest=largest, relative=_finite(largest / max(abs(a), 1e-12)))


def _of_tensors(
    step: int,
    kind: str,
    mine: Tensors,
    theirs: Tensors,
    order: list[str],
    allowed: float,
    before: Tensors | None = None,
) -> Iterator[Difference]:
    """Compares tensors by name.

    Args:
        allowed: the tolerance; 0 requires equal bits.
        before: parameters before the step, to judge relative to the size of the step; None judges relative to the largest
            element.
    """
    least = min(max(_FLOOR, allowed), 1.0) * max((_largest(t) for t in mine.values() if t is not None), default=0.0)
    for name in order:
        a, b = mine[name], theirs[name]
        if a is None or b is None:
            # Only one run has a gradient. Even a gradient of zeros matters, because momentum and weight decay move the parameter.
            for there in (tensor for tensor in (a, b) if tensor is not None):
                yield Difference(step=step, kind=kind, where=name, largest=_largest(there), relative=math.inf)
            continue
        if same_bits(a, b):
            continue
        difference = a.double() - b.double()
        largest = _finite(_largest(difference))
        if before is None:
            relative = largest / max(_largest(a), least, 1e-30)
        else:
            start = before[name]
            moved = a.double() - (start.double() if start is not None else 0.0)
            judged = _beyond_rounding(difference, a) if allowed else difference
            relative = float(judged.norm() / moved.norm().clamp(min=1e-30))
        yield Difference(step=step, kind=kind, where=name, largest=largest, relative=_finite(relative))


def _beyond_rounding(difference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns differences of a parameter's elements beyond the rounding of 32 bits, which may be a large part of a small step.

    In 16 bits, rounding may be the whole step, and nothing would be left to judge.
    """
    if value.element_size() < 4:
        return difference
    return (difference.abs() - torch.finfo(value.dtype).eps * value.double().abs()).clamp(min=0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same values, with NaN equal to NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _unjudged(gradients: Tensors, allowed: float) -> set[str]:
    """Returns unjudged parameters: an adaptive optimizer makes full steps even from a gradient of rounding errors."""
    if not allowed:
        return set()
    if allowed >= INEXACT:
        return set(gradients)
    largest = {name: _largest(g) for name, g in gradients.items() if g is not None}
    most = max(largest.values(), default=0.0)
    return {name for name, value in largest.items() if value < 1e-5 * most}


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _most(found: list[Difference], kind: str) -> float:
    return max((d.largest for d in found if d.kind == kind), default=0.0)


def _by_name(found: list[Difference], *kinds: str) -> dict[str, float]:
    most: dict[str, float] = {}
    for difference in (d for d in found if d.kind in kinds):
        most[difference.where] = max(most.get(difference.where, 0.0), difference.largest)
    return most


def _worst(by_name: dict[str, float]) -> str:
    if not by_name:
        return "0"
    name = max(by_name, key=lambda n: by_name[n])
    return f"{by_name[name]:.3g} ({name})"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
