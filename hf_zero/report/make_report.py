"""A report of the run in a folder: figures, sentences, and what is missing."""

import time
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoint.format import text
from .costs import (
    bytes_section,
    memory_section,
    on_accelerator,
    peak_bytes,
    saves_section,
    time_section,
    timeline_section,
)
from .course import ends_of, eval_losses, loss_section, losses, norm_section, rate_section, speed_section, speeds
from .document import Report, Section
from .findings import findings, state_of
from .log_file import LOG_NAME
from .read_run import RunLines, is_finite, read_run
from .units import several, shown, shown_bytes, shown_count, shown_share

_YEAR_9999_S = 2.5e11


def make_report(folder: Path) -> Report:
    """What the folder of a run tells.

    Raises:
        ReportError: it has neither our log nor a trainer state.
    """
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
        title=text.shown(_title(run) or folder.resolve().name),
        folder=text.shown(folder, 1000),
        state=state_of(run),
        answers=_answers(run, ranks),
        found=findings(run),
        sections=there,
        facts=(("folder", text.shown(folder.resolve().name)), *_facts(run)),
        missing=_missing(run, there),
    )


def _title(run: RunLines) -> str:
    """What was trained, how and when: reports of several runs are told apart by it."""
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
        answers.append(("Speed", middle, f"{unit} a second over {several(ranks, 'rank')}"))
    waited = sum(float(line["wait_s"]) for line in run.steps if is_finite(line.get("wait_s")))
    names = ("forward_s", "backward_s", "optimizer_s")
    within = sum(float(line[name]) for line in run.steps for name in names if is_finite(line.get(name)))
    if within:
        answers.append(("Waiting for other ranks", shown_share(waited, within), "of the time of training steps"))
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
            "No loss was logged, and the model's outputs have none: give losses to `accelerator.log` or `RunRecorder.log`."
        )
    if "timeline" not in keys:
        found.append("No step was followed: the fifth is, and the run has not come so far.")
    if "saves" not in keys:
        found.append("No checkpoint was saved.")
    return tuple(found)
