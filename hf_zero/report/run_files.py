"""The files of a recorded run: written line by line, read without trust."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.files import CheckpointError, no_folder, open_in_place, read_mapping, shown
from ..checkpoint.structure import LOG_NAME, STATE_NAME, is_finite, is_number, is_step
from ..config.checks import SpeltError

# ---- The log of a run: one JSON object a line, only appended, so that it survives any end ----
#
# [Note: lines of the log]
# Each line has a `kind`, the wall clock's `time` in seconds and the optimizer `step` that it was written behind.
#
# | kind | what it tells |
# |---|---|
# | `start` | training begins or goes on: ranks, settings, bytes by the plan |
# | `steps` | some steps together: seconds, rows, tokens, loss, norm, learning rate, bytes sent, seconds waited |
# | `log` | what the script or Trainer logged |
# | `memory` | bytes that the rank holds, by kind |
# | `comm` | calls, bytes and waits by kind of collective, since the line `start` |
# | `trace` | one step's time, span by span |
# | `stall` | seconds for which a save held training up |
# | `end` | how the run ended |
#
# A float that is not finite is written as the text "nan", "inf" or "-inf", which JSON has no number for.

_LONGEST_TEXT = 2000


class LogFile:
    """Appends to the log in a folder, and makes the folder if need be.

    Each line goes to the system at once: a process that is killed leaves all of them but perhaps a part of the last. Where one
    cannot be written, as on a full disk, that is said once and no more are: training goes on.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_NAME
        try:
            # Others may write to the folder of a run, and a link there could name any file of this user.
            handle = open_in_place(self.path, os.O_RDWR | os.O_APPEND)
        except CheckpointError as error:
            raise ReportError(f"hf_zero: {error}.") from error
        self._file = os.fdopen(handle, "a", encoding="utf-8")
        size = os.fstat(self._file.fileno()).st_size
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            # A killed run has left a part of a line.
            self._file.write("\n")

    def write(self, kind: str, step: int, **values: Any) -> None:
        line = {"kind": kind, "time": round(time.time(), 3), "step": step, **values}
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(plain(line), separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            print(f"hf_zero: {self.path} is kept no longer ({error}). Training goes on.", file=sys.stderr, flush=True)
            self.close()

    def close(self) -> None:
        # What could not be written would be tried again here.
        with suppress(OSError):
            self._file.close()


def plain(value: Any) -> Any:
    """Converts a value for JSON: numbers that are not finite, and objects, become text."""
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value)


def read_lines(folder: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields the lines of the log in a folder with their numbers, from 1; None for a foreign or cut line."""
    with (folder / LOG_NAME).open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, _parsed(text)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(line, dict) and isinstance(line.get("kind"), str) and is_step(line.get("step"))
    if not is_line or not isinstance(line.get("time"), int | float):
        return None
    return {shown(name): _as_meant(value) for name, value in line.items()}


def _as_meant(value: Any) -> Any:
    """Numbers that are not finite are text in JSON; other text is made fit to be shown."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else shown(value, _LONGEST_TEXT)
    if isinstance(value, dict):
        return {shown(name): _as_meant(inner) for name, inner in value.items()}
    return [_as_meant(inner) for inner in value] if isinstance(value, list) else value


# ---- What the files in a run's folder tell: our log or, without one, the state that Trainer saved ----

Line = dict[str, Any]


class ReportError(SpeltError):
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
    """The run in a folder. Raises `ReportError`: there is no such folder, or neither log nor trainer state in it."""
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
            f"hf_zero: {folder} has nothing to report on: {LOG_NAME} {why}, and there is no {STATE_NAME}, here or in "
            "a checkpoint-N. Give a run's output_dir, or the folder of a log of `report: true`."
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
    """Clears the log: all of it for a new run, the lines behind the starting step for a resumed one."""
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
