"""The report of a run: its figures are those of the log, its page needs nothing else, and what is damaged or missing is told."""

import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_runs import hf_zero, refusals

from hf_zero.checkpoint.structure import LOG_NAME, PAGE_NAME
from hf_zero.report import page
from hf_zero.report.curves import Plot, Series, shown, shown_bytes, shown_seconds, shown_tick
from hf_zero.report.figures import draw, thinned, ticks_between
from hf_zero.report.page import render_page
from hf_zero.report.run_files import ReportError
from hf_zero.report.sections import make_report

pytestmark = pytest.mark.timeout(60)

_ALONE = {"meta", "br", "line", "rect", "path", "link", "img", "input"}


def log_of(steps: int = 40, *, first: int = 1, ends: bool = True, **changed: Any) -> list[dict[str, Any]]:
    """The lines of a made-up run: losses of 4 / step, norms of 1, 100 tokens in 0.1 s a step."""
    start = {"kind": "start", "step": first - 1, "model": "Tiny<b>", "ranks": 2, "stage": 2, "device": "cpu"}
    plan = {"parameters": 400, "gradients": 200}
    lines: list[dict[str, Any]] = [start | {"plan": plan, "parameters": 100, "optimizers": ["AdamW"], "said": {}}]
    for step in range(first, steps + 1):
        line = {"steps": 1, "rows": 4, "tokens": 100, "forward_s": 0.02, "backward_s": 0.06, "optimizer_s": 0.02}
        more = {"between_s": 0.0, "wait_s": 0.01, "sent_bytes": 200, "peak_bytes": 2**20, "skipped": 0}
        lines.append({"kind": "steps", "step": step, "loss": 9.0, "grad_norm": 1.0, "lr": 0.1} | line | more | changed)
        lines.append({"kind": "log", "step": step, "values": {"loss": 4 / step, "grad_norm": 1.0}})
    rows = [["parameters", 400, 400, "device"], ["gradients", 200, 400, "device"]]
    lines.append({"kind": "memory", "step": steps, "rows": rows, "peak_bytes": 2**20})
    lines.append({"kind": "comm", "step": steps, "rows": [["reduce-scatter of gradients", 80, 8000, 0, 0.4, 0.8]]})
    if steps >= 5:
        phases = [["between steps", 0, 0.01], ["forward", 0.01, 0.03], ["backward", 0.03, 0.1]]
        spans = {"under_way": [["reduce-scatter of gradients", 0.04, 0.08]], "waits": [["all-gather", 0.08, 0.09]]}
        lines.append({"kind": "trace", "step": 5, "seconds": 0.1, "phases": phases, **spans})
    lines.append({"kind": "stall", "step": steps, "seconds": 0.5, "what": "save"})
    return [*lines, {"kind": "end", "step": steps, "how": "finished"}] if ends else lines


def written(folder: Path, *runs: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"time": 1.5} | line) + "\n" for lines in runs for line in lines)
    (folder / LOG_NAME).write_text(text)
    return folder


class Page(HTMLParser):
    """A page's elements, whether each that is opened is closed, and what it asks for from elsewhere."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.asked += [value or "" for name, value in attributes if name in ("src", "href", "action", "srcset", "data")]
        if tag not in _ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _ALONE:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


@pytest.fixture
def folder(tmp_path) -> Path:
    return written(tmp_path / "run", log_of())


def test_the_page_is_whole_and_needs_nothing_else(folder):
    text = render_page(make_report(folder))
    page = Page(text)
    assert not page.open and not page.asked
    assert not re.search(r"https?://|@import|url\(|<link|<img", text)
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(pictures) >= 8
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    keys = {attributes.get("id") for tag, attributes in page.elements if tag == "section"}
    expected = {
        "loss",
        "throughput",
        "time",
        "timeline",
        "memory",
        "communication",
        "grad_norm",
        "learning_rate",
        "saves",
    }
    assert expected <= keys
    assert "Tiny<b>" in "".join(page.text), "what comes from the log is text and no HTML"


def test_every_figure_has_its_lines_values(folder):
    sections = {section.key: section for section in make_report(folder).sections}
    [plot] = sections["loss"].body
    assert plot.series[0].points == tuple((float(step), 4 / step) for step in range(1, 41))
    [speed] = sections["throughput"].body
    # Two ranks, 100 tokens each in 0.1 s.
    assert all(abs(value - 2000) < 1e-6 for _, value in speed.series[0].points)
    [time] = sections["time"].body
    assert {bar.name: round(bar.value, 6) for bar in time.rows} == {
        "forward": 0.8,
        "backward and clipping": 2.4,
        "optimizer step": 0.8,
        "saves": 0.5,
        "between steps: data, logging": 0.0,
    }
    [memory] = sections["memory"].body
    assert [(bar.value, bar.planned, bar.other) for bar in memory.rows] == [(400, 400, 400), (200, 200, 400)]
    [sent] = sections["communication"].body
    assert sent.rows == (("reduce-scatter of gradients", "2", "200 B", "10.0 ms"),)
    assert "80 % of the communication overlapped" in sections["timeline"].sentence


def test_the_page_draws_the_values_of_the_report(folder):
    page = Page(render_page(make_report(folder)))
    plots = [json.loads(attributes["data-series"]) for tag, attributes in page.elements if "data-series" in attributes]
    assert plots[0][0][0] == "training, running median" and len(plots[0][0][1]) == 40
    rates = next(series for series in plots if series[0][0] == "learning rate")
    assert rates[0][1] == [[step, 0.1] for step in range(1, 41)]


def test_a_quiet_run_has_nothing_to_look_at(folder):
    report = make_report(folder)
    assert report.found == () and report.state == "Finished after step 40."
    assert "Nothing unusual" in render_page(report)


def test_a_run_that_broke_off_within_a_line_is_told(tmp_path):
    folder = written(tmp_path / "run", log_of(ends=False))
    with (folder / LOG_NAME).open("a") as file:
        file.write('{"kind":"steps","time":2.0,"st')
    report = make_report(folder)
    assert report.state == "Stopped after step 40 without an end in the log, or is still running."
    assert any("last line of the log is cut off" in sentence for sentence in report.found)


def test_a_resumed_run_has_each_step_once(tmp_path):
    folder = written(tmp_path / "run", log_of(steps=20, ends=False), log_of(steps=30, first=11))
    report = make_report(folder)
    assert any("resumed at step 10, and repeated 10 steps" in sentence for sentence in report.found)
    steps = [step for step, _ in report.sections[0].body[0].series[0].points]
    assert steps == list(range(1, 31))


def test_an_earlier_run_in_the_folder_is_left_out(tmp_path):
    report = make_report(written(tmp_path / "run", log_of(steps=20), log_of(steps=6)))
    assert any("1 earlier run of this folder" in sentence for sentence in report.found)
    assert report.state == "Finished after step 6."


def test_what_went_wrong_is_found(tmp_path):
    lines = log_of()
    spike, slow, bad = (
        next(line for line in lines if line["kind"] == "steps" and line["step"] == at) for at in (9, 12, 40)
    )
    next(line for line in lines if line["kind"] == "log" and line["step"] == 9)["values"]["grad_norm"] = 70.0
    slow["backward_s"] = 0.9
    bad |= {"skipped": 3, "loss": "nan"}
    lines[-1]["how"] = "NonFiniteGradientError: gradients of step 41"
    found = " ".join(make_report(written(tmp_path / "run", lines)).found)
    for told in (
        "did not finish: NonFiniteGradientError",
        "NaN, infinite or beyond 1e150, at step 40",
        "3 steps with NaN or infinite gradients were skipped",
        "The largest, 70.0, was at step 9",
        "a step around step 12",
    ):
        assert told in found
    assert spike["grad_norm"] == 1.0


@pytest.mark.parametrize("where", ["", "checkpoint-8"])
def test_a_run_without_our_log_shows_what_trainer_saved(where, tmp_path):
    history = [{"step": step, "loss": 4 / step, "learning_rate": 0.1, "grad_norm": 2.0} for step in range(1, 9)]
    (tmp_path / where).mkdir(exist_ok=True)
    state = {"global_step": 8, "log_history": [*history, {"step": 8, "eval_loss": 0.5}]}
    (tmp_path / where / "trainer_state.json").write_text(json.dumps(state))
    report = make_report(tmp_path)
    assert [section.key for section in report.sections] == ["loss", "grad_norm", "learning_rate"]
    assert "report: true" in report.missing[0]
    assert not Page(render_page(report)).open


def test_a_folder_with_nothing_to_report_on_is_refused_by_name(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ReportError, match=re.escape(str(folder))):
            make_report(folder)
    (tmp_path / LOG_NAME).write_bytes(b"\xff\x00 no log\n")
    with pytest.raises(ReportError, match="no readable line"):
        make_report(tmp_path)
    (tmp_path / "trainer_state.json").write_text('{"log_hi')
    with pytest.raises(ReportError, match="damaged"):
        make_report(tmp_path)


def test_no_text_of_a_log_is_obeyed_by_a_terminal(tmp_path):
    odd = "\x1b[31mred \x9b2J \u202e\x00"
    lines = log_of(steps=12)
    lines[0] |= {"model": odd, "said": {odd: odd}, "optimizers": [odd]}
    lines[-1]["how"] = odd
    lines = [
        {**line, "rows": [[odd, *row[1:]] for row in line["rows"]]} if isinstance(line.get("rows"), list) else line
        for line in lines
    ]
    page = render_page(make_report(written(tmp_path / "a \x1b[31m run", lines)))
    assert page.replace("\n", "").isprintable() and page.count(r"\x1b[31mred \x9b2J \u202e\x00") > 5


@pytest.mark.parametrize("value", [None, "nan", -1, [], {}, "x" * 50, 1e308, True])
def test_a_line_with_odd_values_breaks_no_report(value, tmp_path):
    lines = log_of(steps=12)
    for kind in {line["kind"] for line in lines} - {"end"}:
        changed = [
            {
                name: value if line["kind"] == kind and name not in ("kind", "step") else held
                for name, held in line.items()
            }
            for line in lines
        ]
        assert not Page(render_page(make_report(written(tmp_path / "run", changed)))).open
    assert not Page(render_page(make_report(written(tmp_path / "run", lines[:1])))).open


EXTREMES = [
    *((1e308, -1e308), (1.7e308, 2.0), (5e-324, 0.0), (1e-300, 1e300), (1e150, 1e-150), (1.0, 1.0000000000000002)),
    *((10**400, 1), (2**70, 2**70 + 1), (2**63 - 1, 1), (2**53, 2**53 - 1), ("inf", "-inf"), (-1e150, 1e150), (0, 0)),
]


def places_of_numbers(line: object, place: tuple = ()) -> list[tuple]:
    if isinstance(line, dict | list):
        inner = line.items() if isinstance(line, dict) else enumerate(line)
        return [found for name, value in inner for found in places_of_numbers(value, (*place, name))]
    return [place] if isinstance(line, int | float) else []


def with_value(line: object, place: tuple, value: object) -> object:
    if not place:
        return value
    inner = with_value(line[place[0]], place[1:], value)
    return {**line, place[0]: inner} if isinstance(line, dict) else [*line[: place[0]], inner, *line[place[0] + 1 :]]


@pytest.mark.short_cells("(1.7e+308, 2.0)", "('inf', '-inf')")
@pytest.mark.parametrize("values", EXTREMES, ids=lambda values: str(values)[:30])
def test_no_number_however_large_or_small_breaks_a_report(values, tmp_path):
    """Two by turns in the place of each number of each kind of line, one place after the other."""
    lines = log_of(steps=32)
    places = {
        (line["kind"], place) for line in lines for place in places_of_numbers(line) if isinstance(place[-1], str)
    } | {(line["kind"], places_of_numbers(line)[-1]) for line in lines}
    for kind, place in sorted(places, key=str):
        changed = [
            with_value(line, place, values[number % 2])
            if line["kind"] == kind and place in places_of_numbers(line)
            else line
            for number, line in enumerate(lines)
        ]
        try:
            report = make_report(written(tmp_path / "run", changed))
        except ReportError:
            continue
        page = render_page(report)
        assert not re.search(r'="[^"]*\b(?:nan|inf)\b', page), (kind, place)
        json.dumps(report.as_json(), allow_nan=False)


def test_a_single_value_is_a_visible_dot():
    one, two = (
        draw(Plot(series=(Series(name="loss", points=points),))) for points in (((3, 1.0),), ((3, 1.0), (4, 2.0)))
    )
    assert 'class="line main dot"' in one and 'class="line main"' in two
    template = (Path(page.__file__).with_name("page.html")).read_text()
    assert float(re.search(r"\.line\.dot { stroke-width: (\d+)px", template)[1]) >= 6


def test_the_command_writes_a_page_or_one_json_document(folder, tmp_path):
    assert hf_zero("report", folder).stdout.strip() == str(folder / PAGE_NAME)
    assert (folder / PAGE_NAME).read_text().startswith("<!DOCTYPE html>")
    assert hf_zero("report", folder, "--output", tmp_path / "sub" / "a.html").stdout.strip().endswith("a.html")
    document = json.loads(hf_zero("report", folder, "--json").stdout)
    assert [section["key"] for section in document["sections"]][:2] == ["loss", "throughput"]


def test_a_page_is_written_through_no_link(folder, tmp_path):
    (tmp_path / "victim").write_text("keep")
    (folder / PAGE_NAME).symlink_to(tmp_path / "victim")
    # The name that the page had before it was whole could be guessed.
    (folder / f"{PAGE_NAME}.tmp-{os.getpid()}").symlink_to(tmp_path / "victim")
    [line] = refusals("report", folder, "--output", folder / PAGE_NAME)
    assert line.endswith("is a link or not a regular file, so nothing was written. Name a new file.")
    hf_zero("report", folder)
    assert (tmp_path / "victim").read_text() == "keep" and not (folder / PAGE_NAME).is_symlink()


def test_the_command_refuses_an_empty_folder_in_one_line(tmp_path):
    [line] = refusals("report", tmp_path)
    assert str(tmp_path) in line and LOG_NAME in line


def test_the_title_tells_model_stage_ranks_and_date(tmp_path):
    lines = log_of()
    lines[0]["time"] = time.mktime((2026, 3, 9, 14, 5, 0, 0, 0, -1))
    report = make_report(written(tmp_path / "run", lines))
    assert report.title == "Tiny<b>, stage 2, 2 ranks, 2026-03-09 14:05"
    text = render_page(report)
    assert "<title>Tiny&lt;b&gt;, stage 2, 2 ranks, 2026-03-09 14:05: training report</title>" in text
    assert dict(report.facts)["folder"] == "run"


@pytest.mark.parametrize("at", [2**70, -1, 1e308])
def test_a_date_that_is_none_is_left_out_of_the_title(at, tmp_path):
    lines = log_of()
    lines[0]["time"] = at
    assert make_report(written(tmp_path / "run", lines)).title == "Tiny<b>, stage 2, 2 ranks"


def test_waits_in_agreements_are_told_apart_from_communication(tmp_path):
    lines = log_of()
    [trace], [comm] = ([line for line in lines if line["kind"] == kind] for kind in ("trace", "comm"))
    # The agreement's wait of half the step would leave little hidden.
    trace["waits"].append(["agreement on the gradient norm", 0.01, 0.06])
    trace["under_way"].append(["agreement on the gradient norm", 0.01, 0.06])
    comm["rows"].append(["agreement on the gradient norm", 80, 16, 0, 4.0, 4.0])
    sections = {section.key: section for section in make_report(written(tmp_path / "run", lines)).sections}
    assert "80 % of the communication overlapped" in sections["timeline"].sentence
    assert "Another 50.0 ms were spent in agreements of a few bytes" in sections["timeline"].sentence
    [timeline] = sections["timeline"].body
    assert [lane.name for lane in timeline.lanes][-1] == "agreements between ranks"
    said = sections["communication"].sentence
    assert "waits for 10.0 ms" in said and "spends 100 ms in agreements" in said


@pytest.mark.parametrize("high", [1e-3, 5e-5, 2e-5, 1e-5, 1.5e-5, 3e-7, 5e-10])
def test_ticks_of_learning_rates_are_short_and_differ(high):
    ticks = ticks_between(0, high)
    told = [shown_tick(tick, ticks[1] - ticks[0]) for tick in ticks]
    assert told[0] == "0" and len(set(told)) == len(told) and max(map(len, told)) <= 7
    assert [float(each) for each in told] == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (1e-5, 1.0000001e-5),
        (1e12, 1e12 + 5),
        (1e9, 1.0001e9),
        (0, 1),
        (-3, 7),
        (1e-6, 2e-6),
        (4.96, 5.06),
        (0, 123456),
        (999, 1001),
    ],
)
def test_axes_have_a_few_round_values_around_what_is_shown(low, high):
    ticks = ticks_between(low, high)
    assert 4 <= len(ticks) <= 10 and ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9
    assert len({shown_tick(tick, ticks[1] - ticks[0]) for tick in ticks}) == len(ticks)


def test_thinning_keeps_the_spikes():
    points = [(float(step), 1.0) for step in range(10_000)]
    points[5123] = (5123.0, 80.0)
    kept = thinned(points)
    assert len(kept) <= 600 and (5123.0, 80.0) in kept


def test_numbers_have_units():
    assert [shown_bytes(n) for n in (0, 900, 1536, 3 * 2**30)] == ["0 B", "900 B", "1.50 KiB", "3.00 GiB"]
    assert [shown_seconds(s) for s in (0.0000042, 0.42, 4, 65, 4000)] == [
        "4.20 µs",
        "420 ms",
        "4.00 s",
        "1 min 5 s",
        "1 h 7 min",
    ]
    assert [shown(v) for v in (1234.5, 12.34, 0.01234, 0, float("inf"))] == ["1,234", "12.3", "0.0123", "0", "inf"]
