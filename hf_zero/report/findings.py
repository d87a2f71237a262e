"""What went wrong in a run, or was out of the ordinary."""

from statistics import median

from .course import norms, training_seconds
from .document import Point
from .read_run import RunLines, is_finite
from .units import several, shown, shown_bytes, shown_seconds

_SPIKE = 10.0
_SLOW = 3.0
_GROWTH = 1.1


def findings(run: RunLines) -> tuple[str, ...]:
    """In sentences, the gravest first."""
    return tuple(
        sentence
        for find in (_ending, _not_finite, _skipped, _spikes, _slow_steps, _growth, _resumed, _damage)
        for sentence in find(run)
    )


def state_of(run: RunLines) -> str:
    """How the run ended."""
    last = max((line["step"] for line in (*run.steps, *run.logs)), default=0)
    if not run.has_log:
        return f"Known up to step {last:,}."
    if run.end is None:
        return f"Broke off behind step {last:,}, or is still running."
    how = str(run.end.get("how"))
    return f"Finished after step {last:,}." if how == "finished" else f"Ended behind step {last:,}: {how}."


def _ending(run: RunLines) -> list[str]:
    if not run.has_log:
        return []
    if run.end is None:
        return ["The log has no end: the run broke off, or is still running."]
    how = str(run.end.get("how"))
    return [] if how == "finished" else [f"The run did not finish: {how}."]


def _not_finite(run: RunLines) -> list[str]:
    bad = [
        line["step"]
        for line in run.logs
        for name, value in (line.get("values") or {}).items()
        if name in ("loss", "train_loss", "eval_loss") and _is_lost(value)
    ]
    bad += [line["step"] for line in run.steps if _is_lost(line.get("loss"))]
    return [f"The loss was NaN, infinite or beyond 1e150, at step {min(bad):,} for the first time."] if bad else []


def _is_lost(value: object) -> bool:
    """Whether a loss is NaN, infinite, or so large that nothing can be calculated with it."""
    return isinstance(value, float) and not is_finite(value) and not abs(value) < 1


def _skipped(run: RunLines) -> list[str]:
    last = run.steps[-1] if run.steps else {}
    count = last.get("skipped")
    if not isinstance(count, int) or not count:
        return []
    return [f"{several(count, 'step')} with NaN or infinite gradients {'was' if count == 1 else 'were'} left out."]


def _spikes(run: RunLines) -> list[str]:
    points: list[Point] = norms(run)
    if len(points) < 10:
        return []
    middle = median(value for _, value in points)
    spikes = [(step, value) for step, value in points if middle > 0 and value > _SPIKE * middle]
    if not spikes:
        return []
    step, value = max(spikes, key=lambda point: point[1])
    return [
        f"The gradient norm was more than {_SPIKE:.0f} times its median in {several(len(spikes), 'place')}, most at step "
        f"{step:,.0f} with {shown(value)}."
    ]


def _slow_steps(run: RunLines) -> list[str]:
    # The first line has what is done once.
    times = [
        (line["step"], training_seconds(line) / line["steps"])
        for line in run.steps[1:]
        if isinstance(line.get("steps"), int) and line["steps"] > 0
    ]
    if len(times) < 10:
        return []
    middle = median(seconds for _, seconds in times)
    slow = [(step, seconds) for step, seconds in times if seconds > _SLOW * middle]
    if not slow:
        return []
    step, seconds = max(slow, key=lambda point: point[1])
    at_most = f"around step {step:,} one took {shown_seconds(seconds)}, where half of them took less than {shown_seconds(middle)}"
    return [f"Steps were more than {_SLOW:.0f} times slower than usual in {several(len(slow), 'place')}: {at_most}."]


def _growth(run: RunLines) -> list[str]:
    peaks = [line["peak_bytes"] for line in run.steps if is_finite(line.get("peak_bytes"))]
    if len(peaks) < 20:
        return []
    middle, last = peaks[len(peaks) // 2], peaks[-1]
    if last <= _GROWTH * middle:
        return []
    return [f"Memory grew to the end: its peak was {shown_bytes(middle)} half way and {shown_bytes(last)} at the end."]


def _resumed(run: RunLines) -> list[str]:
    found = []
    at = [line["step"] for line in run.starts if line["step"]]
    if at:
        again = f", and {several(run.taken_again, 'step')} taken again" if run.taken_again else ""
        found.append(f"The run was resumed at step {', '.join(f'{step:,}' for step in at)}{again}.")
    if run.earlier:
        found.append(f"{several(run.earlier, 'earlier run')} in this folder began anew and left out here.")
    return found


def _damage(run: RunLines) -> list[str]:
    if not run.unread:
        return []
    if run.unread == [run.lines]:
        return ["The last line of the log is cut off: the run was killed while it wrote it."]
    return [
        f"{several(len(run.unread), 'line')} of the log cannot be read and {'is' if len(run.unread) == 1 else 'are'} left out."
    ]
