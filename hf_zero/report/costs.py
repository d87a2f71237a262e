"""Where time, memory and bytes of a run went."""

from collections.abc import Sequence
from typing import Any

from .course import evaluations, stall_points
from .document import Bar, Bars, Lane, Section, Table, Timeline
from .read_run import RunLines, is_finite
from .units import several, shown_bytes, shown_seconds, shown_share

# Of the memory report's kinds → the plan's.
_PLANNED = {
    "parameters": ("parameters", "parameters kept whole"),
    "frozen": ("frozen parameters and buffers", "frozen parameters"),
    "masters": ("fp32 master",),
    "gradients": ("gradients",),
    "residuals": ("gradient residuals",),
    "gradient buffers": ("gradient buffers",),
    "optimizer state": ("optimizer state",),
    "copies for early steps": ("copies of the state", "gradients of early steps"),
}


def on_accelerator(run: RunLines) -> bool:
    return bool(run.starts) and not str(run.starts[-1].get("device", "cpu")).startswith("cpu")


def time_section(run: RunLines) -> Section | None:
    """Seconds of the whole run by what was done."""
    if not run.steps:
        return None
    sums = {
        name: sum(float(line.get(name) or 0.0) for line in run.steps)
        for name in ("forward_s", "backward_s", "optimizer_s", "between_s", "wait_s")
    }
    saves = sum(seconds for _, seconds in stall_points(run, "save"))
    evals = sum(seconds for _, seconds in evaluations(run))
    within = sums["forward_s"] + sums["backward_s"] + sums["optimizer_s"]
    rest = max(0.0, sums["between_s"] - saves - evals)
    total = within + saves + evals + rest
    # An accelerator's host only queues: what it has done by when says nothing of a step's parts.
    parts = (
        [("training steps", within)]
        if on_accelerator(run)
        else [
            ("forward", sums["forward_s"]),
            ("backward and clipping", sums["backward_s"]),
            ("optimizer step", sums["optimizer_s"]),
        ]
    )
    aside = [("evaluation", evals), ("saves", saves)]
    parts += [(name, seconds) for name, seconds in aside if seconds] + [("between steps: data, logging", rest)]
    rows = tuple(
        Bar(name=name, value=seconds, shown=shown_seconds(seconds), notes=(shown_share(seconds, total),))
        for name, seconds in parts
    )
    waited = sums["wait_s"]
    sentence = f"Of {shown_seconds(total)}, {shown_share(within, total)} were training steps."
    if waited:
        sentence += (
            f" For {shown_seconds(waited)}, {shown_share(waited, total)} of all, training stood still for other ranks."
        )
    else:
        sentence += " None of it stood still for other ranks."
    return Section(
        key="time",
        title="Where time went",
        sentence=sentence,
        body=(Bars(columns=("what", "time", "share"), rows=rows),),
        note="Of rank 0, by the host's clock. Time that stood still for other ranks, for traffic and for those that came later, "
        "is a part of the rows above.",
    )


def timeline_section(run: RunLines) -> Section | None:
    """One step's spans."""
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
            f"Something was under way between the ranks for {shown_seconds(running)} of it, and training stood still for "
            f"{shown_seconds(waited)}: {shown_share(running - waited, running)} of communication was hidden behind computation."
        )
    else:
        sentence += "No parameters and gradients were sent between ranks in it."
    if agreements:
        # A few bytes, such as those of the gradient norm: no traffic that could be hidden.
        agreed = shown_seconds(_covered(agreements))
        sentence += f" For {agreed} more it waited in agreements of a few bytes, mostly for ranks that came later."
    return Section(
        key="timeline",
        title="One step",
        sentence=sentence,
        body=(Timeline(seconds=total, lanes=tuple(lanes)),),
        note="Of rank 0, by the clock of the device that is trained on. Pale: from the start of a collective until its result is "
        "asked for, so it may have ended before. Full: training stands still for it.",
    )


def _spans(value: Any, seconds: float) -> list[tuple[str, float, float]]:
    """(name, start, end) of each span in a step of so many seconds."""
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
    """Whether ranks only told each other a number: what takes time then is that one waits for another."""
    return kind.startswith("agreement")


def _first(kind: str, *spans: Sequence[tuple[str, float, float]]) -> float:
    return min(start for found in spans for name, start, _ in found if name == kind)


def _covered(spans: Sequence[tuple[str, float, float]]) -> float:
    """Seconds in which there is at least one of the spans."""
    total, reached = 0.0, 0.0
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def memory_section(run: RunLines) -> Section | None:
    """Bytes by kind against the plan and DDP."""
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
    sentence = f"Rank 0 holds {shown_bytes(ours)} of state, {shown_share(ours, ddp)} of what DDP would hold ({shown_bytes(ddp)})."
    if peak:
        what = "device memory" if on_accelerator(run) else "the process, code and activations and all,"
        sentence += f" The peak of {what} was {shown_bytes(peak)}."
    return Section(
        key="memory",
        title="Memory",
        sentence=sentence,
        body=(Bars(columns=("kind", "held", "planned", "DDP"), rows=tuple(bars)),),
        note="Behind a backward, when gradients are there. The stroke is what was planned, the outline what DDP would hold.",
    )


def _peak(run: RunLines) -> float:
    return max((float(line["peak_bytes"]) for line in run.steps if is_finite(line.get("peak_bytes"))), default=0.0)


def peak_bytes(run: RunLines) -> float:
    """The most that rank 0 has held."""
    return _peak(run)


def _rows(lines: Sequence[dict[str, Any]], width: int) -> list[list[Any]]:
    """The rows of the last of these lines."""
    rows = lines[-1].get("rows") if lines else None
    return [row for row in rows if isinstance(row, list) and len(row) == width] if isinstance(rows, list) else []


def bytes_section(run: RunLines) -> Section | None:
    """Bytes and waits by kind of collective, a step."""
    rows = [row for row in _rows(run.comm, 6) if all(map(is_finite, row[1:]))]
    if not rows or not run.comm:
        return None
    begun = run.starts[-1]["step"] if run.starts else 0
    steps = max(1, run.comm[-1]["step"] - begun)
    sent, between = (sum(row[place] for row in rows) for place in (2, 3))
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
    sentence = (
        f"In a step, rank 0 sends {shown_bytes(sent / steps)} and stands still for {shown_seconds(waited / steps)}."
    )
    if agreed:
        sentence += f" It waits {shown_seconds(agreed / steps)} in agreements, mostly for ranks that come later."
    if between:
        sentence += f" {shown_share(between, sent)} of the bytes go to other nodes."
    return Section(
        key="communication",
        title="Communication",
        sentence=sentence if sent else "This rank has sent nothing to others.",
        body=(Table(columns=tuple(columns), rows=tuple(table)),),
        note=f"Means over {several(steps, 'step')}, evaluations and saves between them included.",
    )


def saves_section(run: RunLines) -> Section | None:
    """Seconds of standing still, by save."""
    points = stall_points(run)
    if not points:
        return None
    total = sum(seconds for _, seconds in points)
    step, longest = max(points, key=lambda point: point[1])
    rows = tuple(Bar(name=f"step {at:,.0f}", value=s, shown=shown_seconds(s)) for at, s in points[-_SAVES_SHOWN:])
    more = f" The last {_SAVES_SHOWN} are shown." if len(points) > _SAVES_SHOWN else ""
    held = f"{several(len(points), 'save')} held training up for {shown_seconds(total)}"
    sentence = f"{held} in all; the longest, at step {step:,.0f}, for {shown_seconds(longest)}.{more}"
    return Section(
        key="saves",
        title="Saves",
        sentence=sentence if len(points) > 1 else f"{held}, at step {step:,.0f}.",
        body=(Bars(columns=("save", "training stood still"), rows=rows),),
        note="What is written behind training is not counted.",
    )


_SAVES_SHOWN = 12
