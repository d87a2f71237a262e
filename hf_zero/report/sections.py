"""Sections of the report page: costs, findings, and an overview of the run."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoint.faults import shown as escaped
from ..checkpoint.run_log import is_finite
from ..checkpoint.structure import LOG_NAME
from .curves import (
    Bar,
    Bars,
    Lane,
    Point,
    Report,
    Section,
    Table,
    Timeline,
    ends_of,
    eval_losses,
    evaluations,
    loss_section,
    losses,
    norm_section,
    norms,
    rate_section,
    several,
    shown,
    shown_bytes,
    shown_count,
    shown_seconds,
    shown_share,
    speed_section,
    speeds,
    stall_points,
    training_seconds,
)
from .run_files import RunLines, read_run

# ---- Time, memory and bytes of a run ----

# Kinds of the memory report → kinds of the plan.
_PLANNED = {
    "parameters": ("parameters", "parameters kept whole"),
    "frozen": ("frozen parameters and buffers", "frozen parameters"),
    "masters": ("fp32 master",),
    "gradients": ("gradients",),
    "residuals": ("gradient residuals",),
    "gradient buffers": ("gradient buffers",),
    "optimizer state": ("optimizer state",),
}


def on_accelerator(run: RunLines) -> bool:
    return bool(run.starts) and not str(run.starts[-1].get("device", "cpu")).startswith("cpu")


def time_section(run: RunLines) -> Section | None:
    """Shows the seconds of the whole run by kind of work."""
    if not run.steps:
        return None
    sums = {
        name: sum(float(line.get(name) or 0.0) for line in run.steps)
        for name in ("forward_s", "backward_s", "optimizer_s", "between_s", "wait_s")
    }
    saves = sum(seconds for _, seconds in stall_points(run, "save"))
    evals = sum(seconds for _, seconds in evaluations(run))
    within = sums["forward_s"] + sums["backward_s"] + sums["optimizer_s"]
    between = max(0.0, sums["between_s"] - saves - evals)
    total = within + saves + evals + between
    # An accelerator's host only queues work, so the host's clock says nothing about the parts of a step.
    parts = (
        [("training steps", within)]
        if on_accelerator(run)
        else [
            ("forward", sums["forward_s"]),
            ("backward and clipping", sums["backward_s"]),
            ("optimizer step", sums["optimizer_s"]),
        ]
    )
    pauses = [("evaluation", evals), ("saves", saves)]
    parts += [(name, seconds) for name, seconds in pauses if seconds] + [("between steps: data, logging", between)]
    rows = tuple(
        Bar(name=name, value=seconds, shown=shown_seconds(seconds), notes=(shown_share(seconds, total),))
        for name, seconds in parts
    )
    waited = sums["wait_s"]
    sentence = f"Of {shown_seconds(total)}, {shown_share(within, total)} were training steps."
    if waited:
        sentence += (
            f" Rank 0 waited for other ranks for {shown_seconds(waited)}, {shown_share(waited, total)} of the time."
        )
    else:
        sentence += " Rank 0 never waited for other ranks."
    return Section(
        key="time",
        title="Where time went",
        sentence=sentence,
        body=(Bars(columns=("what", "time", "share"), rows=rows),),
        note="Rank 0, by the host's clock. The rows include the time spent waiting for communication and for slower ranks.",
    )


def timeline_section(run: RunLines) -> Section | None:
    """Shows the spans of one step."""
    if not run.traces:
        return None
    trace = run.traces[-1]
    total = trace.get("seconds")
    if not is_finite(total) or not total:
        return None
    total = float(total)
    phases, under_way, waits = (_spans(trace.get(name), total) for name in ("phases", "under_way", "waits"))
    agreements = [span for span in waits if _is_agreement(span[0])]
    under_way, waits = ([span for span in spans if not _is_agreement(span[0])] for spans in (under_way, waits))
    kinds = sorted({name for name, *_ in (*under_way, *waits)}, key=lambda kind: _first(kind, under_way, waits))
    lanes = [Lane(name="computing", spans=tuple(phases))]
    lanes += [
        Lane(
            name=kind,
            spans=tuple(span for span in under_way if span[0] == kind),
            waits=tuple(span for span in waits if span[0] == kind),
        )
        for kind in kinds
    ]
    if agreements:
        lanes.append(Lane(name="agreements between ranks", spans=(), waits=tuple(agreements)))
    running, waited = _covered(under_way + waits), _covered(waits)
    sentence = f"Step {trace['step']:,} took {shown_seconds(total)}. "
    if running:
        sentence += (
            f"Communication ran for {shown_seconds(running)} of this time, and training waited for {shown_seconds(waited)}: "
            f"{shown_share(running - waited, running)} of the communication overlapped with computation."
        )
    else:
        sentence += "The ranks exchanged no parameters and no gradients."
    if agreements:
        # Agreements send only a few bytes, such as the gradient norm, so there is no traffic to hide.
        agreed = shown_seconds(_covered(agreements))
        sentence += f" Another {agreed} were spent in agreements of a few bytes, mostly waiting for slower ranks."
    return Section(
        key="timeline",
        title="One step",
        sentence=sentence,
        body=(Timeline(seconds=total, lanes=tuple(lanes)),),
        note="Rank 0, by the clock of the training device. Pale: from the start of a collective until its result is needed, so "
        "the collective may have ended earlier. Solid: training waits for the collective.",
    )


def _spans(value: Any, seconds: float) -> list[tuple[str, float, float]]:
    """Returns (name, start, end) of each span in a step of length `seconds`."""
    rows = value if isinstance(value, list) else []
    return [
        (row[0], min(max(0.0, float(row[1])), seconds), min(max(0.0, float(row[2])), seconds))
        for row in rows
        if isinstance(row, list)
        and len(row) == 3
        and isinstance(row[0], str)
        and is_finite(row[1])
        and is_finite(row[2])
    ]


def _is_agreement(kind: str) -> bool:
    """Whether ranks only exchanged a number, so the time is one rank waiting for another."""
    return kind.startswith("agreement")


def _first(kind: str, *spans: Sequence[tuple[str, float, float]]) -> float:
    return min(start for found in spans for name, start, _ in found if name == kind)


def _covered(spans: Sequence[tuple[str, float, float]]) -> float:
    """Returns the seconds covered by at least one of the spans."""
    total, reached = 0.0, 0.0
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def memory_section(run: RunLines) -> Section | None:
    """Shows bytes by kind, compared with the plan and DDP."""
    rows = [row for row in _rows(run.memory, 4) if is_finite(row[1]) and is_finite(row[2])]
    if not rows:
        return None
    held: dict[tuple[str, str], list[float]] = {}
    for kind, nbytes, ddp_bytes, where in rows:
        group = next((name for name, kinds in _PLANNED.items() if kind in kinds), kind)
        sums = held.setdefault((group, str(where)), [0.0, 0.0])
        sums[0] += nbytes
        sums[1] += ddp_bytes
    plan = run.starts[-1].get("plan") if run.starts else None
    planned: dict[str, Any] = dict(plan or {})
    bars = []
    for (kind, where), (nbytes, ddp_bytes) in held.items():
        wanted = planned.pop(kind, None)
        if nbytes or ddp_bytes or wanted:
            said = shown_bytes(wanted) if is_finite(wanted) else ""
            bars.append(
                Bar(
                    name=kind if where == "device" else f"{kind} ({where})",
                    value=nbytes,
                    shown=shown_bytes(nbytes),
                    planned=wanted if is_finite(wanted) else None,
                    other=ddp_bytes,
                    notes=(said, shown_bytes(ddp_bytes) if ddp_bytes else "0"),
                )
            )
    ours, ddp = sum(bar.value for bar in bars), sum(bar.other or 0 for bar in bars)
    peak = _peak(run)
    sentence = f"Rank 0 holds {shown_bytes(ours)} of state, {shown_share(ours, ddp)} of DDP's {shown_bytes(ddp)}."
    if peak:
        what = "device memory" if on_accelerator(run) else "the process, including code and activations,"
        sentence += f" The peak of {what} was {shown_bytes(peak)}."
    return Section(
        key="memory",
        title="Memory",
        sentence=sentence,
        body=(Bars(columns=("kind", "held", "planned", "DDP"), rows=tuple(bars)),),
        note="After a backward, while gradients exist. The stroke marks the plan, and the outline shows DDP.",
    )


def _peak(run: RunLines) -> float:
    return max((float(line["peak_bytes"]) for line in run.steps if is_finite(line.get("peak_bytes"))), default=0.0)


def peak_bytes(run: RunLines) -> float:
    """Returns the largest peak of rank 0."""
    return _peak(run)


def _rows(lines: Sequence[dict[str, Any]], width: int) -> list[list[Any]]:
    rows = lines[-1].get("rows") if lines else None
    return [row for row in rows if isinstance(row, list) and len(row) == width] if isinstance(rows, list) else []


def bytes_section(run: RunLines) -> Section | None:
    """Shows bytes and waits per step by kind of collective."""
    rows = [row for row in _rows(run.comm, 6) if all(map(is_finite, row[1:]))]
    if not rows or not run.comm:
        return None
    begun = run.starts[-1]["step"] if run.starts else 0
    steps = max(1, run.comm[-1]["step"] - begun)
    sent, between = (sum(row[column] for row in rows) for column in (2, 3))
    waited, agreed = (sum(row[4] for row in rows if _is_agreement(str(row[0])) is told) for told in (False, True))
    columns = ["kind", "calls a step", "sent a step", "waited a step"]
    if between:
        columns.insert(3, "to other nodes")
    table = []
    for kind, calls, nbytes, to_others, wait_s, _ in sorted(rows, key=lambda row: -row[2]):
        cells = [kind, f"{calls / steps:.3g}", shown_bytes(nbytes / steps), shown_seconds(wait_s / steps)]
        if between:
            cells.insert(3, shown_bytes(to_others / steps))
        table.append(tuple(cells))
    sentence = f"In a step, rank 0 sends {shown_bytes(sent / steps)} and waits for {shown_seconds(waited / steps)}."
    if agreed:
        sentence += f" It spends {shown_seconds(agreed / steps)} in agreements, mostly waiting for slower ranks."
    if between:
        sentence += f" {shown_share(between, sent)} of the bytes go to other nodes."
    return Section(
        key="communication",
        title="Communication",
        sentence=sentence if sent else "This rank has sent nothing to others.",
        body=(Table(columns=tuple(columns), rows=tuple(table)),),
        note=f"Means over {several(steps, 'step')}, including the evaluations and saves between them.",
    )


def saves_section(run: RunLines) -> Section | None:
    """Shows the seconds for which each save blocked training."""
    points = stall_points(run)
    if not points:
        return None
    total = sum(seconds for _, seconds in points)
    step, longest = max(points, key=lambda point: point[1])
    rows = tuple(Bar(name=f"step {at:,.0f}", value=s, shown=shown_seconds(s)) for at, s in points[-_SAVES_SHOWN:])
    more = f" The last {_SAVES_SHOWN} are shown." if len(points) > _SAVES_SHOWN else ""
    held = f"{several(len(points), 'save')} blocked training for {shown_seconds(total)}"
    sentence = f"{held} in total; the longest, at step {step:,.0f}, took {shown_seconds(longest)}.{more}"
    return Section(
        key="saves",
        title="Saves",
        sentence=sentence if len(points) > 1 else f"{held}, at step {step:,.0f}.",
        body=(Bars(columns=("save", "blocked training"), rows=rows),),
        note="Without the time of writes in the background.",
    )


_SAVES_SHOWN = 12


# ---- Problems and unusual events of a run ----

_SPIKE = 10.0
_SLOW = 3.0
_GROWTH = 1.1


def findings(run: RunLines) -> tuple[str, ...]:
    """Lists findings in sentences, the most serious first."""
    return tuple(
        sentence
        for find in (_ending, _not_finite, _skipped, _spikes, _slow_steps, _growth, _resumed, _damage)
        for sentence in find(run)
    )


def state_of(run: RunLines) -> str:
    """Says how the run ended."""
    last = max((line["step"] for line in (*run.steps, *run.logs)), default=0)
    if not run.has_log:
        return f"Known up to step {last:,}."
    if run.end is None:
        return f"Stopped after step {last:,} without an end in the log, or is still running."
    how = str(run.end.get("how"))
    return f"Finished after step {last:,}." if how == "finished" else f"Ended after step {last:,}: {how}."


def _ending(run: RunLines) -> list[str]:
    if not run.has_log:
        return []
    if run.end is None:
        return ["The log has no end: the run was killed, or is still running."]
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
    """Whether a loss is NaN, infinite, or too large for arithmetic."""
    return isinstance(value, float) and not is_finite(value) and not abs(value) < 1


def _skipped(run: RunLines) -> list[str]:
    last = run.steps[-1] if run.steps else {}
    count = last.get("skipped")
    if not isinstance(count, int) or not count:
        return []
    return [f"{several(count, 'step')} with NaN or infinite gradients {'was' if count == 1 else 'were'} skipped."]


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
        f"The gradient norm was more than {_SPIKE:.0f} times its median on {several(len(spikes), 'occasion')}. The largest, "
        f"{shown(value)}, was at step {step:,.0f}."
    ]


def _slow_steps(run: RunLines) -> list[str]:
    # Skip the first line, which contains one-time work.
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
    at_most = f"a step around step {step:,} took {shown_seconds(seconds)}, and the median is {shown_seconds(middle)}"
    return [f"Steps were more than {_SLOW:.0f} times slower than usual on {several(len(slow), 'occasion')}: {at_most}."]


def _growth(run: RunLines) -> list[str]:
    peaks = [line["peak_bytes"] for line in run.steps if is_finite(line.get("peak_bytes"))]
    if len(peaks) < 20:
        return []
    middle, last = peaks[len(peaks) // 2], peaks[-1]
    if last <= _GROWTH * middle:
        return []
    return [
        f"Memory grew: the peak was {shown_bytes(middle)} halfway through the run and {shown_bytes(last)} at the end."
    ]


def _resumed(run: RunLines) -> list[str]:
    found = []
    at = [line["step"] for line in run.starts if line["step"]]
    if at:
        again = f", and repeated {several(run.taken_again, 'step')}" if run.taken_again else ""
        found.append(f"The run was resumed at step {', '.join(f'{step:,}' for step in at)}{again}.")
    if run.earlier:
        found.append(f"The log has {several(run.earlier, 'earlier run')} of this folder, which this report omits.")
    return found


def _damage(run: RunLines) -> list[str]:
    if not run.unread:
        return []
    if run.unread == [run.lines]:
        return ["The last line of the log is cut off: the run was killed while it wrote it."]
    return [
        f"{several(len(run.unread), 'line')} of the log cannot be read, and this report omits "
        f"{'it' if len(run.unread) == 1 else 'them'}."
    ]


# ---- The report of the run in a folder: figures, sentences, and missing data ----

_YEAR_9999_S = 2.5e11


def make_report(folder: Path) -> Report:
    """Makes the report of a run's folder. Raises `ReportError` if the folder has neither our log nor a trainer state."""
    run = read_run(folder)
    ranks = _ranks(run)
    sections = (
        loss_section(run),
        speed_section(run, ranks),
        time_section(run),
        timeline_section(run),
        memory_section(run),
        bytes_section(run),
        norm_section(run),
        rate_section(run),
        saves_section(run),
    )
    there = tuple(section for section in sections if section is not None)
    return Report(
        title=escaped(_title(run) or folder.resolve().name),
        folder=escaped(folder, 1000),
        state=state_of(run),
        answers=_answers(run, ranks),
        found=findings(run),
        sections=there,
        facts=(("folder", escaped(folder.resolve().name)), *_facts(run)),
        missing=_missing(run, there),
    )


def _title(run: RunLines) -> str:
    """Builds a title from model, settings and date, to distinguish reports of several runs."""
    start = run.starts[-1] if run.starts else {}
    stage, ranks, begun_s = (start.get(name) for name in ("stage", "ranks", "time"))
    parts = [str(start["model"])] if start.get("model") else []
    parts += [f"stage {stage}"] if isinstance(stage, int) else []
    parts += [several(ranks, "rank")] if isinstance(ranks, int) else []
    at_s = float(begun_s) if begun_s is not None and is_finite(begun_s) else 0.0
    if parts and 0 < at_s < _YEAR_9999_S:
        parts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s)))
    return ", ".join(parts)


def _ranks(run: RunLines) -> int:
    ranks = run.starts[-1].get("ranks") if run.starts else None
    return ranks if isinstance(ranks, int) and ranks > 0 else 1


def _answers(run: RunLines, ranks: int) -> tuple[tuple[str, str, str], ...]:
    answers = []
    points, _ = losses(run)
    evals = eval_losses(run)
    if points:
        first, last = ends_of(points)
        more = f"from {shown(first)}" + (f"; evaluation {shown(min(v for _, v in evals))} at best" if evals else "")
        answers.append(("Loss", shown(last), more))
    rates, unit = speeds(run, ranks)
    if rates:
        middle = shown(median(value for _, value in rates))
        answers.append(("Speed", middle, f"{unit} a second on {several(ranks, 'rank')}"))
    waited = sum(float(line["wait_s"]) for line in run.steps if is_finite(line.get("wait_s")))
    names = ("forward_s", "backward_s", "optimizer_s")
    within = sum(float(line[name]) for line in run.steps for name in names if is_finite(line.get(name)))
    if within:
        answers.append(("Waiting for other ranks", shown_share(waited, within), "of the time in training steps"))
    if peak := peak_bytes(run):
        answers.append(
            ("Peak memory", shown_bytes(peak), "of rank 0's device" if on_accelerator(run) else "of rank 0's process")
        )
    return tuple(answers)


def _facts(run: RunLines) -> tuple[tuple[str, str], ...]:
    if not run.starts:
        return ()
    start = run.starts[-1]
    facts: list[tuple[str, Any]] = [("model", start.get("model"))]
    if isinstance(start.get("parameters"), int):
        facts.append(("trained parameters", shown_count(start["parameters"])))
    facts += [
        ("optimizer", ", ".join(map(str, start.get("optimizers") or ())) or None),
        ("ZeRO stage", start.get("stage")),
        ("ranks", start.get("ranks")),
        ("device", start.get("device")),
        ("backend", start.get("backend")),
        ("settings", ", ".join(f"{name} {value}" for name, value in (start.get("said") or {}).items()) or None),
    ]
    return tuple((name, str(value)) for name, value in facts if value is not None)


_OF_OUR_LOG = "throughput, time, one step, memory, communication and saves"


def _missing(run: RunLines, there: tuple[Section, ...]) -> tuple[str, ...]:
    if not run.has_log:
        return (
            f"This run kept no {LOG_NAME}, so {_OF_OUR_LOG} are not known. Train with `report: true` for them "
            "(`--zero stage=2,report=true`).",
        )
    keys = {section.key for section in there}
    found = []
    if "loss" not in keys:
        found.append(
            "No loss was logged, and the model's outputs contain none: pass losses to `accelerator.log` or `RunRecorder.log`."
        )
    if "timeline" not in keys:
        found.append("No step was traced: the fifth step is, and the run has had fewer.")
    if "saves" not in keys:
        found.append("No checkpoint was saved.")
    return tuple(found)
