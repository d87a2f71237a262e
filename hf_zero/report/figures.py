"""Draws figures: lines and bars in SVG, which scales with the page, and text in HTML, which keeps its size."""

import json
import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from .curves import Bar, Bars, Lane, Plot, Point, Series, Table, Timeline, shown, shown_seconds, shown_tick

_MOST_POINTS = 600
_MOST_NUMBERS = 12
_SHADES = {"between steps": 0, "forward": 1, "backward": 2, "optimizer step": 3}


def draw(body: Plot | Bars | Timeline | Table) -> Markup:
    """Draws a figure. Its contents are also given as text, for screen readers."""
    if isinstance(body, Plot):
        return _plot(body)
    if isinstance(body, Bars):
        return _bars(body)
    return _timeline(body) if isinstance(body, Timeline) else _table(body)


# ---- lines ----


def _plot(plot: Plot) -> Markup:
    points = [point for series in plot.series for point in series.points]
    left, right = min(step for step, _ in points), max(step for step, _ in points)
    if left == right:
        left, right = left - 1, right + 1
    ticks = ticks_between(*_range(plot))
    low, high = ticks[0], ticks[-1]

    def across(step: float) -> float:
        return 100 * (step - left) / (right - left)

    def down(value: float) -> float:
        return 100 * (high - value) / (high - low)

    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="100" y1="{0:.2f}" y2="{0:.2f}"/>').format(down(tick)) for tick in ticks
    )
    lines = Markup("").join(_line(series, across, down) for series in plot.series)
    steps = [tick for tick in ticks_between(left, right, least=2, whole=True) if left <= tick <= right]
    labels = Markup("").join(
        Markup('<span class="y" style="top:{:.2f}%">{}</span>').format(
            down(tick), shown_tick(tick, ticks[1] - ticks[0])
        )
        for tick in ticks
    ) + Markup("").join(
        Markup('<span class="x" style="left:{:.2f}%">{:,.0f}</span>').format(across(tick), tick) for tick in steps
    )
    data = [[series.name, thinned(series.points)] for series in plot.series if series.role != "beside"]
    scale = [left, right, low, high]
    return Markup(
        '<div class="plot" data-series="{data}" data-scale="{scale}" data-unit="{unit}">'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{words}">'
        "<title>{words}</title>{grid}{lines}</svg>{labels}"
        '<span class="cursor" hidden></span></div><p class="axis">step</p>{key}{numbers}'
    ).format(
        data=json.dumps(data),
        scale=json.dumps(scale),
        unit=plot.unit,
        words=_in_words(plot),
        grid=grid,
        lines=lines,
        labels=labels,
        key=_key(plot.series),
        numbers=_numbers(plot),
    )


def _range(plot: Plot) -> tuple[float, float]:
    values = [value for series in plot.series for _, value in series.points]
    low, high = min(values), max(values)
    if plot.zero:
        low, high = min(0.0, low), max(0.0, high)
    # If the values differ by less than their digits can show, the axis would have a single tick.
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        reach = abs(low) / 10 or 1.0
        low, high = low - reach, high + reach
    return low, high


def ticks_between(low: float, high: float, *, least: int = 3, whole: bool = False) -> list[float]:
    """Returns round tick values from at or below `low` to at or above `high`.

    `high - low` spans at least `least` tick intervals, and at most two and a half times as many.
    """
    rough = (high - low) / least
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (5, 2, 1) if factor * power <= rough * 1.001)
    if whole:
        size = max(1.0, size)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [count * size for count in range(first, last + 1)]


def _line(series: Series, across, down) -> Markup:
    points, kind = thinned(series.points), series.role
    if len(points) == 1:
        # A line of length zero with round ends is a dot as wide as the stroke.
        points, kind = [points[0], points[0]], f"{kind} dot"
    path = "M" + "L".join(f"{across(step):.2f} {down(value):.2f}" for step, value in points)
    return Markup('<path class="line {}" d="{}"/>').format(kind, path)


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Returns at most `most` points: the lowest and the highest of each stretch, which keeps all spikes."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _key(all_series: Sequence[Series]) -> Markup:
    if len(all_series) < 2:
        return Markup("")
    items = Markup("").join(
        Markup('<span class="{}"><i></i>{}</span>').format(series.role, series.name) for series in all_series
    )
    return Markup('<p class="key">{}</p>').format(items)


def _in_words(plot: Plot) -> str:
    parts = []
    for series in plot.series:
        values = [value for _, value in series.points]
        parts.append(
            f"{series.name}: {len(values)} values from {shown(values[0])} at step {series.points[0][0]:,.0f} to "
            f"{shown(values[-1])} at step {series.points[-1][0]:,.0f}, lowest {shown(min(values))}, highest {shown(max(values))}"
        )
    return "; ".join(parts) + (f" ({plot.unit})" if plot.unit else "")


def _numbers(plot: Plot) -> Markup:
    """Shows some of the values as a table, closed at first."""
    series = [series for series in plot.series if series.role != "beside"]
    steps = sorted({step for one in series for step, _ in one.points})
    steps = [steps[round(at * (len(steps) - 1) / max(1, _MOST_NUMBERS - 1))] for at in range(_MOST_NUMBERS)]
    by_step = [dict(one.points) for one in series]
    # If only one of several lines has a value at a step, the cells of the other lines are empty.
    rows = tuple(
        (f"{step:,.0f}", *("" if step not in values else shown(values[step]) for values in by_step))
        for step in dict.fromkeys(steps)
    )
    table = _table(Table(columns=("step", *(one.name for one in series)), rows=rows))
    return Markup("<details><summary>Numbers</summary>{}</details>").format(table)


# ---- bars ----


def _bars(bars: Bars) -> Markup:
    most = max((value for bar in bars.rows for value in (bar.value, bar.planned, bar.other) if value), default=1.0)
    name, value, *further = bars.columns
    head = Markup('<th>{}</th><th></th><th class="n">{}</th>').format(name, value) + Markup("").join(
        Markup('<th class="n">{}</th>').format(column) for column in further
    )
    rows = Markup("").join(_bar(bar, most) for bar in bars.rows)
    return Markup(
        '<div class="scroll"><table class="bars"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(head, rows)


def _bar(bar: Bar, most: float) -> Markup:
    parts = [Markup('<rect class="held" y="3" height="10" width="{:.2f}"/>').format(100 * bar.value / most)]
    if bar.other is not None:
        parts.append(
            Markup('<rect class="other" y="3" height="10" width="{:.2f}"/>').format(min(99.6, 100 * bar.other / most))
        )
    if bar.planned is not None:
        across = min(99.5, 100 * bar.planned / most)
        parts.append(Markup('<line class="planned" x1="{0:.2f}" x2="{0:.2f}" y1="0" y2="16"/>').format(across))
    words = f"{bar.name}: {bar.shown}"
    picture = Markup(
        '<svg viewBox="0 0 100 16" preserveAspectRatio="none" role="img" aria-label="{0}"><title>{0}</title>{1}</svg>'
    ).format(words, Markup("").join(parts))
    notes = Markup("").join(Markup('<td class="n">{}</td>').format(note) for note in bar.notes)
    return Markup('<tr><th scope="row">{}</th><td class="bar">{}</td><td class="n">{}</td>{}</tr>').format(
        bar.name, picture, bar.shown, notes
    )


def _table(table: Table) -> Markup:
    head = Markup("").join(
        Markup("<th{}>{}</th>").format(Markup(' class="n"') if index else "", column)
        for index, column in enumerate(table.columns)
    )
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            row[0], Markup("").join(Markup('<td class="n">{}</td>').format(cell) for cell in row[1:])
        )
        for row in table.rows
    )
    return Markup('<div class="scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        head, rows
    )


# ---- a step ----


def _timeline(timeline: Timeline) -> Markup:
    lanes = Markup("").join(
        _lane(lane, timeline.seconds, is_first=index == 0) for index, lane in enumerate(timeline.lanes)
    )
    scale_ms = 1e3 * timeline.seconds
    ticks = [tick for tick in ticks_between(0, scale_ms, least=2) if tick <= scale_ms]
    size = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    labels = Markup("").join(
        Markup('<span class="x" style="left:{:.2f}%">{}</span>').format(100 * tick / scale_ms, shown_tick(tick, size))
        for tick in ticks
    )
    return Markup('<div class="timeline">{}<div class="ruler">{}</div><p class="axis">ms</p></div>').format(
        lanes, labels
    )


def _lane(lane: Lane, seconds: float, *, is_first: bool) -> Markup:
    spans = Markup("").join(
        _span(span, seconds, f"phase p{_shade(span[0])}" if is_first else "under") for span in lane.spans
    )
    waits = Markup("").join(_span(span, seconds, "wait") for span in lane.waits)
    ran, waited = (sum(end - start for _, start, end in group) for group in (lane.spans, lane.waits))
    under = f"under way {shown_seconds(ran)}, " if ran else ""
    told = _parts_of(lane) if is_first else f"{under}waited for {shown_seconds(waited)}"
    shown_told = _swatches(lane) if is_first else told
    return Markup(
        '<div class="lane"><p><b>{name}</b> <span>{shown_told}</span></p>'
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{name}: {told}">'
        "<title>{name}: {told}</title>{spans}{waits}</svg></div>"
    ).format(name=lane.name, told=told, shown_told=shown_told, spans=spans, waits=waits)


def _swatches(lane: Lane) -> Markup:
    """Shows the names and sums of the phases, each with its color."""
    return Markup(" ").join(
        Markup('<span class="swatch"><i class="p{}"></i>{} {}</span>').format(_shade(name), name, shown_seconds(span_s))
        for name, span_s in _sums(lane).items()
    )


def _shade(phase: str) -> int:
    return _SHADES.get(phase, 0)


def _parts_of(lane: Lane) -> str:
    return ", ".join(f"{name} {shown_seconds(span_s)}" for name, span_s in _sums(lane).items())


def _sums(lane: Lane) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, start, end in lane.spans:
        sums[name] = sums.get(name, 0.0) + end - start
    return sums


def _span(span: tuple[str, float, float], seconds: float, kind: str) -> Markup:
    name, start, end = span
    words = escape(f"{name}: {shown_seconds(end - start)}")
    return Markup('<rect class="{}" x="{:.3f}" width="{:.3f}" y="0" height="10"><title>{}</title></rect>').format(
        kind, 100 * start / seconds, max(0.15, 100 * (end - start) / seconds), words
    )
