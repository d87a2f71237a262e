"""What the files in a run's folder tell: our log or, without one, the state that Trainer saved."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.format.errors import CheckpointError
from ..checkpoint.format.files import no_folder
from ..checkpoint.format.json_files import read_mapping
from ..checkpoint.structure import STATE_NAME
from .log_file import LOG_NAME, is_step, read_lines

Line = dict[str, Any]


_LEAST, _MOST = 1e-150, 1e150


class ReportError(Exception):
    """A folder of which no report can be made."""


@dataclass
class RunLines:
    """Lines of a run by kind, in order; see [Note: lines of the log].

    Attributes:
        has_log: whether our log was there; else `logs` is all that is known.
        earlier: lines of runs in the same folder that began anew afterwards.
        taken_again: steps that a resumed run has taken a second time; the first are left out.
        unread: numbers of lines that are no JSON, such as the last of a run that was killed.
    """

    folder: Path
    has_log: bool
    starts: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)
    logs: list[Line] = field(default_factory=list)
    memory: list[Line] = field(default_factory=list)
    comm: list[Line] = field(default_factory=list)
    traces: list[Line] = field(default_factory=list)
    stalls: list[Line] = field(default_factory=list)
    end: Line | None = None
    earlier: int = 0
    taken_again: int = 0
    unread: list[int] = field(default_factory=list)
    lines: int = 0


def is_number(value: object) -> bool:
    """Whether a value of a line can be calculated with, be it finite or not."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def is_finite(value: object) -> bool:
    """Whether sums, differences and ratios of such values are numbers again: no loss is beyond 1e150, and none below 1e-150."""
    return is_number(value) and (value == 0 or _LEAST <= abs(value) <= _MOST)  # type: ignore[arg-type]  # it is a number


def _is_amount(value: object) -> bool:
    return is_finite(value) and 0 <= value < 2**63  # type: ignore[operator]  # it is a number


def _is_count(value: object) -> bool:
    return type(value) is int and _is_amount(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


_AMOUNTS = ("forward_s", "backward_s", "optimizer_s", "between_s", "wait_s", "sent_bytes", "peak_bytes", "seconds")
_COUNTS = ("steps", "rows", "tokens", "skipped")
_WHAT_IS_WHAT: dict[str, dict[str, Callable[[object], bool]]] = {
    "start": {
        "ranks": lambda value: _is_count(value) and value != 0,
        "parameters": _is_count,
        "stage": _is_count,
        "optimizers": _is_list,
        "said": _is_mapping,
        "plan": _is_mapping,
        "model": _is_text,
        "device": _is_text,
        "backend": _is_text,
    },
    "steps": {
        **dict.fromkeys(_AMOUNTS, _is_amount),
        **dict.fromkeys(_COUNTS, _is_count),
        **dict.fromkeys(("loss", "grad_norm", "lr"), is_number),
    },
    "log": {"values": _is_mapping},
    "memory": {"rows": _is_list},
    "comm": {"rows": _is_list},
    "trace": {"seconds": _is_amount},
    "stall": {"seconds": _is_amount},
    "end": {"how": _is_text},
}
"""Of each kind of line, the fields that are relied on; one with another value is taken for one that is not there."""

_LISTS = {
    "steps": "steps",
    "log": "logs",
    "memory": "memory",
    "comm": "comm",
    "trace": "traces",
    "stall": "stalls",
}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def read_run(folder: Path) -> RunLines:
    """The run in a folder.

    Raises:
        ReportError: there is no such folder, or neither log nor trainer state in it.
    """
    if not folder.is_dir():
        raise ReportError(f"hf_zero: {no_folder(folder)}.")
    log = folder / LOG_NAME
    if log.is_file():
        run = _of_log(folder)
        if run.starts or run.logs:
            return run
    state = _newest_state(folder)
    if state is None:
        why = "holds no line that can be read" if log.is_file() else "is not there"
        raise ReportError(
            f"hf_zero: {folder} has nothing to report on: {LOG_NAME} {why}, and there is no {STATE_NAME}, here or in a "
            "checkpoint-N. Give the output_dir of a run, or the folder that a run with `report: true` wrote its log to."
        )
    return _of_state(folder, state)


def _of_log(folder: Path) -> RunLines:
    run = RunLines(folder=folder, has_log=True)
    for number, line in read_lines(folder):
        run.lines = number
        if line is None:
            run.unread.append(number)
            continue
        line = _checked(line)
        if line["kind"] == "start":
            _begin(run, line)
        elif line["kind"] == "end":
            run.end = line
        elif line["kind"] in _LISTS:
            getattr(run, _LISTS[line["kind"]]).append(line)
    return run


def _checked(line: Line) -> Line:
    known = _WHAT_IS_WHAT.get(line["kind"], {})
    return {name: value for name, value in line.items() if name not in known or known[name](value)}


def _begin(run: RunLines, start: Line) -> None:
    """A run that begins anew replaces what was there; one that goes on, what came behind the step that it goes on from."""
    step = start["step"]
    last = max((line["step"] for line in run.steps), default=0)
    if step == 0 and run.starts:
        run.earlier += len(run.starts)
        run.starts = []
    run.taken_again += max(0, last - step) if step else 0
    for name in _LISTS.values():
        setattr(run, name, [line for line in getattr(run, name) if 0 < line["step"] <= step])
    # It counts from the last start.
    run.comm = []
    run.starts.append(start)
    run.end = None


def _newest_state(folder: Path) -> Path | None:
    found = [path for path in folder.glob(f"checkpoint-*/{STATE_NAME}") if _CHECKPOINT.fullmatch(path.parent.name)]
    found.sort(key=lambda path: int(path.parent.name.rpartition("-")[2]))
    own = folder / STATE_NAME
    # Trainer writes its folder's own at the end.
    return own if own.is_file() else found[-1] if found else None


def _of_state(folder: Path, path: Path) -> RunLines:
    try:
        history = read_mapping(path).get("log_history")
    except CheckpointError as error:
        raise ReportError(str(error)) from error
    if not isinstance(history, list):
        raise ReportError(f"hf_zero: {path} has no log_history, so there is nothing to report on.")
    run = RunLines(folder=folder, has_log=False)
    for entry in history:
        if isinstance(entry, Mapping) and is_step(entry.get("step")):
            values = {name: value for name, value in entry.items() if is_number(value)}
            run.logs.append({"kind": "log", "step": entry["step"], "values": values})
    return run
