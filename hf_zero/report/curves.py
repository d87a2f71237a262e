"""Curves of a run, and the data classes of the report."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ..checkpoint.run_log import is_finite
from .run_files import Line, RunLines

# ---- Numbers with units, in a form that is easy to read ----


def shown_bytes(nbytes: float) -> str:
    """Formats bytes: 1536 → "1.5 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{shown(nbytes / size)} {unit}"
    return f"{round(nbytes)} B"


def shown_seconds(seconds: float) -> str:
    """Formats seconds: 0.0042 → "4.2 ms", 4000 → "1 h 7 min"."""
    if not seconds < 1e12:
        return f"{seconds:.3g} s" if math.isfinite(seconds) else str(seconds)
    if seconds < 1e-3:
        return f"{shown(1e6 * seconds)} µs"
    if seconds < 1:
        return f"{shown(1e3 * seconds)} ms"
    if seconds < 60:
        return f"{shown(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        whole, remaining = divmod(round(seconds), 60)
        return f"{whole} min {remaining} s" if remaining else f"{whole} min"
    hours, remaining = divmod(minutes, 60)
    return f"{hours} h {remaining} min" if remaining else f"{hours} h"


def shown(value: float) -> str:
    """Formats three significant figures, without an exponent if possible: 1234.5 → "1,234", 4 → "4.00"."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    if magnitude >= 1e9:
        return f"{value:.3g}"
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    if magnitude >= 1:
        return f"{value:.2f}"
    if magnitude >= 1e-4 or magnitude == 0:
        return f"{value:.3g}"
    return f"{value:.2e}".replace("e-0", "e-")


def shown_tick(value: float, size: float) -> str:
    """Formats a round value of an axis with enough decimals to distinguish the next tick, which is `size` further."""
    if not value:
        return "0"
    if abs(value) >= 1e9 or size < 1e-4:
        # Use as many digits as are needed to distinguish neighboring ticks: 2e-5, 1.5e-5.
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(size) + 1e-9))
        figures, _, power = f"{value:.{digits}e}".partition("e")
        return f"{figures}e{int(power)}"
    return f"{value:,.{max(0, -math.floor(math.log10(size) + 1e-9))}f}"


def shown_count(count: int) -> str:
    """Formats a count: 1234567 → "1.23 million"."""
    for word, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{shown(count / size)} {word}"
    return f"{count:,}"


def shown_share(part: float, whole: float) -> str:
    if not whole:
        return "0 %"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %" if percent >= 0.05 else "0 %"


def several(count: int, noun: str) -> str:
    """Counts a noun: "1 step", "3 steps"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# ---- A report as plain values: the page draws them, and `hf-zero report --json` prints them ----

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a plot: finite points in the order of steps.

    Attributes:
        role: "main" stands out, "beside" is drawn thin, "other" is dashed.
    """

    name: str
    points: tuple[Point, ...]
    role: str = "main"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Values over steps.

    Attributes:
        unit: the unit of the values; "" if they have none.
        zero: whether the value axis begins at zero.
    """

    series: tuple[Series, ...]
    unit: str = ""
    zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar with its value, and optionally the planned value and a second value.

    Attributes:
        shown: the value with its unit.
        planned, other: on the same scale; None means unknown.
        notes: further columns.
    """

    name: str
    value: float
    shown: str
    planned: float | None = None
    other: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A table of bars on one scale.

    Attributes:
        columns: headings of the names, of the values, and of the further columns.
    """

    columns: tuple[str, ...]
    rows: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A lane of a timeline: spans as (name, start, end) in seconds, and the spans in which training was blocked."""

    name: str
    spans: tuple[tuple[str, float, float], ...]
    waits: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    seconds: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A figure with a sentence above it.

    Attributes:
        key: the name in JSON, and the anchor on the page.
        sentence: the message of the figure.
        note: how the figure was measured, and its limits.
    """

    key: str
    title: str
    sentence: str
    body: tuple[Plot | Bars | Timeline | Table, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a run.

    Attributes:
        state: how the run ended, in a sentence.
        answers: (question, answer, more), shown at the top.
        found: sentences about problems and unusual events.
        facts: model, settings and hardware of the run.
        missing: sentences about data that the folder does not contain.
    """

    title: str
    folder: str
    state: str
    answers: tuple[tuple[str, str, str], ...]
    found: tuple[str, ...]
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...]
    missing: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# ---- Loss, learning rate, gradient norm and speed over the steps of a run ----

_LOSS_NAMES = ("loss", "train_loss", "training_loss", "train/loss")
_EVAL_NAMES = ("eval_loss", "eval/loss", "val_loss", "valid_loss")
_NORM_NAMES = ("grad_norm", "train/grad_norm")
_RATE_NAMES = ("learning_rate", "lr", "train/lr", "train/learning_rate")


def logged(run: RunLines, names: Sequence[str]) -> list[Point]:
    """Returns the values of the first logged name of `names`. If a step was logged twice, the last value counts."""
    for name in names:
        found = {
            line["step"]: line["values"][name]
            for line in run.logs
            if isinstance(line.get("values"), dict) and is_finite(line["values"].get(name))
        }
        if found:
            return sorted((float(step), float(value)) for step, value in found.items())
    return []


def counted(run: RunLines, name: str) -> list[Point]:
    """Returns a field of the lines of steps."""
    return [(float(line["step"]), float(line[name])) for line in run.steps if is_finite(line.get(name))]


def losses(run: RunLines) -> tuple[list[Point], str]:
    """Returns the training loss and its source."""
    points = logged(run, _LOSS_NAMES)
    if points:
        return points, "as the script or Trainer logged it"
    return counted(run, "loss"), "of rank 0's last micro-batch, which is noisier than a mean over all ranks"


def eval_losses(run: RunLines) -> list[Point]:
    return logged(run, _EVAL_NAMES)


def norms(run: RunLines) -> list[Point]:
    return logged(run, _NORM_NAMES) or counted(run, "grad_norm")


def ends_of(points: Sequence[Point]) -> tuple[float, float]:
    """Returns the means of the first and the last tenth of the values, because single batches are noisy."""
    tenth = max(1, len(points) // 10)
    values = [value for _, value in points]
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def smoothed(points: Sequence[Point]) -> tuple[Point, ...]:
    """Returns running medians over a thirtieth of the points."""
    reach = max(1, len(points) // 60)
    values = [value for _, value in points]
    return tuple(
        (step, float(median(values[max(0, at - reach) : at + reach + 1]))) for at, (step, _) in enumerate(points)
    )


def loss_section(run: RunLines) -> Section | None:
    points, origin = losses(run)
    evals = eval_losses(run)
    if not points and not evals:
        return None
    sentences = []
    if len(points) > 1:
        first, last = ends_of(points)
        moved = "fell" if last < first else "rose" if last > first else "stayed"
        between = f"at {shown(last)}" if moved == "stayed" else f"from {shown(first)} to {shown(last)}"
        sentences.append(
            f"The training loss {moved} {between} between steps {points[0][0]:,.0f} and {points[-1][0]:,.0f}."
        )
    elif points:
        sentences.append(f"One training loss was logged: {shown(points[0][1])} at step {points[0][0]:,.0f}.")
    if evals:
        step, best = min(evals, key=lambda point: point[1])
        at_the_end = "the last" if step == evals[-1][0] else f"the last is {shown(evals[-1][1])}"
        sentences.append(f"The lowest evaluation loss was {shown(best)} at step {step:,.0f}, {at_the_end}.")
    series = _with_medians("training", points)
    if evals:
        series = (*series, Series(name="evaluation", points=tuple(evals), role="other"))
    return Section(
        key="loss",
        title="Loss",
        sentence=" ".join(sentences),
        body=(Plot(series=series),),
        note=f"Training loss {origin}; the sentence compares the means of the first and the last 10 %."
        if points
        else "",
    )


def _with_medians(name: str, points: Sequence[Point]) -> tuple[Series, ...]:
    if len(points) < 30:
        return (Series(name=name, points=tuple(points)),) if points else ()
    return (
        Series(name=name, points=tuple(points), role="beside"),
        Series(name=f"{name}, running median", points=smoothed(points)),
    )


def norm_section(run: RunLines) -> Section | None:
    points = norms(run)
    if not points:
        return None
    step, largest = max(points, key=lambda point: point[1])
    middle = median(value for _, value in points)
    times = f", {shown(largest / middle)} times the median" if middle > 0 and largest > 2 * middle else ""
    return Section(
        key="grad_norm",
        title="Gradient norm",
        sentence=f"The median norm is {shown(middle)}. The largest, at step {step:,.0f}, is {shown(largest)}{times}.",
        body=(Plot(series=_with_medians("gradient norm", points), zero=True),),
        note="Over all parameters and ranks, before clipping.",
    )


def rate_section(run: RunLines) -> Section | None:
    points = logged(run, _RATE_NAMES) or counted(run, "lr")
    if not points:
        return None
    step, highest = max(points, key=lambda point: point[1])
    last = points[-1][1]
    constant = all(value == highest for _, value in points)
    told = (
        f"It was {shown(highest)} throughout."
        if constant
        else (f"The highest was {shown(highest)} at step {step:,.0f}, and the last {shown(last)}.")
    )
    return Section(
        key="learning_rate",
        title="Learning rate",
        sentence=told,
        body=(Plot(series=(Series(name="learning rate", points=tuple(points)),), zero=True),),
        note="Of the optimizer's first parameter group.",
    )


def training_seconds(line: Line) -> float:
    """Sums the seconds of the steps, without the time between them."""
    return sum(float(line.get(name) or 0.0) for name in ("forward_s", "backward_s", "optimizer_s"))


def speeds(run: RunLines, ranks: int) -> tuple[list[Point], str]:
    """Returns the speed over all ranks in tokens per second, or in samples or steps if the inputs are no tokens, and the unit.

    The time between steps counts, except the time of saves and evaluations.
    """
    unit = next((unit for unit in ("tokens", "rows") if any(line.get(unit) for line in run.steps)), "steps")
    excluded = _excluded_seconds(run)
    points = []
    for line in run.steps:
        between = max(0.0, float(line.get("between_s") or 0.0) - excluded.get(line["step"], 0.0))
        seconds = training_seconds(line) + between
        amount = line.get(unit) or 0
        speed = amount * (1 if unit == "steps" else ranks) / seconds if seconds > 0 else 0.0
        if speed and is_finite(speed):
            points.append((float(line["step"]), speed))
    return points, unit


def _excluded_seconds(run: RunLines) -> dict[int, float]:
    """Seconds of saves and evaluations, by the step of the line with this time in `between_s`."""
    ends = [line["step"] for line in run.steps]
    found: dict[int, float] = {}
    for step, seconds in [*stall_points(run, "save"), *evaluations(run)]:
        following = next((end for end in ends if end > step), None)
        if following is not None:
            found[following] = found.get(following, 0.0) + seconds
    return found


def stall_points(run: RunLines, what: str | None = None) -> list[Point]:
    """Returns the seconds for which saves blocked training, by step.

    Args:
        what: "save" for the call itself, "copy" for the work that the save leaves to the next step; None means both.
    """
    found: dict[float, float] = {}
    for line in run.stalls:
        if is_finite(line.get("seconds")) and what in (None, line.get("what")):
            found[line["step"]] = found.get(line["step"], 0.0) + line["seconds"]
    return sorted(found.items())


def evaluations(run: RunLines) -> list[Point]:
    """Returns the seconds of evaluations by step, as Trainer logs them."""
    return logged(run, ("eval_runtime",))


def speed_section(run: RunLines, ranks: int) -> Section | None:
    points, unit = speeds(run, ranks)
    if not points:
        return _logged_speed(run)
    middle = median(value for _, value in points)
    slowest = min(points, key=lambda point: point[1])
    seconds = sum(training_seconds(line) for line in run.steps)
    steps = sum(line.get("steps") or 0 for line in run.steps)
    sentence = (
        f"The median throughput was {shown(middle)} {unit} a second on {several(ranks, 'rank')}. A step took "
        f"{shown_seconds(seconds / max(1, steps))} on average."
    )
    if slowest[1] < 0.5 * middle:
        sentence += f" The slowest part was around step {slowest[0]:,.0f}, with {shown(slowest[1])}."
    return Section(
        key="throughput",
        title="Throughput",
        sentence=sentence,
        body=(Plot(series=_with_medians(f"{unit} a second", points), unit=f"{unit}/s", zero=True),),
        note="Includes the time between steps, but not saves and evaluations. "
        + ("Rank 0's count is multiplied by the number of ranks." if unit != "steps" else ""),
    )


def _logged_speed(run: RunLines) -> Section | None:
    rate = logged(run, ("train_samples_per_second",))
    if not rate:
        return None
    return Section(
        key="throughput",
        title="Throughput",
        sentence=f"Trainer counted {shown(rate[-1][1])} samples a second over the whole run.",
        body=(),
    )
