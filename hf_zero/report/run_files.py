"""The files of a recorded run: written line by line, and read with checks of each value."""

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

from ..checkpoint.faults import CheckpointError, shown
from ..checkpoint.files import no_folder, open_in_place
from ..checkpoint.json_files import read_mapping
from ..checkpoint.run_log import STATE_NAME, is_finite, is_number, is_step
from ..checkpoint.structure import LOG_NAME
from ..config.checks import SpelledError

# ---- The log of a run: one JSON object per line, only appended, so that the log survives a crash ----
#
# [Note: lines of the log]
# Each line has a `kind`, the wall clock's `time` in seconds, and the optimizer `step` after which it was written.
#
# | kind | contents |
# |---|---|
# | `start` | training begins or continues: ranks, settings, planned bytes |
# | `steps` | several steps together: seconds, samples, tokens, loss, norm, learning rate, bytes sent, seconds waited |
# | `log` | values logged by the script or Trainer |
# | `memory` | bytes held by the rank, by kind |
# | `comm` | calls, bytes and waits by kind of collective, since the line `start` |
# | `trace` | one step's time, span by span |
# | `stall` | seconds for which a save blocked training |
# | `end` | how the run ended |
#
# JSON has no number for NaN and infinity, so such a float is written as the text "nan", "inf" or "-inf".

_LONGEST_TEXT = 2000


class LogFile:
    """Appends to the log in a folder, and creates the folder if needed.

    Each line is flushed at once: a killed process loses at most a part of its last line. If a line cannot be written, for example
    on a full disk, one message is printed, later lines are dropped, and training continues.

    Attributes:
        path: the path of the file.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_NAME
        try:
            # Other users may have write access to the folder, and a link there could point at any file of this user.
            handle = open_in_place(self.path, os.O_RDWR | os.O_APPEND)
        except CheckpointError as error:
            raise ReportError(f"hf_zero: {error}.") from error
        self._file = os.fdopen(handle, "a", encoding="utf-8")
        size = os.fstat(self._file.fileno()).st_size
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            # A killed run left an unfinished line.
            self._file.write("\n")

    def write(self, kind: str, step: int, **values: Any) -> None:
        line = {"kind": kind, "time": round(time.time(), 3), "step": step, **values}
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(plain(line), separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            print(
                f"hf_zero: {self.path} cannot be written any more ({error}). Training continues.",
                file=sys.stderr,
                flush=True,
            )
            self.close()

    def close(self) -> None:
        # Closing would try to write the buffered line again.
        with suppress(OSError):
            self._file.close()


def plain(value: Any) -> Any:
    """Converts a value for JSON: NaN, infinities and objects become text."""
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
    """Yields the lines of the log in a folder with their numbers, from 1. A foreign or truncated line is None."""
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
    """Converts the texts for NaN and infinities back to numbers, and makes other text safe to show."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else shown(value, _LONGEST_TEXT)
    if isinstance(value, dict):
        return {shown(name): _as_meant(inner) for name, inner in value.items()}
    return [_as_meant(inner) for inner in value] if isinstance(value, list) else value


# ---- Reads a run's folder: our log or, without a log, the state that Trainer saved ----

Line = dict[str, Any]


class ReportError(SpelledError):
    """No report can be made from a folder."""


@dataclass
class RunLines:
    """Lines of a run by kind, in order; see [Note: lines of the log].

    Attributes:
        has_log: whether our log exists; otherwise only `logs` is known.
        earlier: number of runs that started in this folder before the last run that started at step 0.
        taken_again: steps that a resumed run repeated; their first lines are left out.
        unread: numbers of lines that are not JSON, such as the last line of a killed run.
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
_CHECKS: dict[str, dict[str, Callable[[object], bool]]] = {
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
"""By kind of line, the checks of the fields that the report reads. A field that fails its check counts as missing."""

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
    """Reads the run in a folder. Raises `ReportError` if the folder is missing, or has neither a log nor a trainer state."""
    if not folder.is_dir():
        raise ReportError(f"hf_zero: {no_folder(folder)}.")
    log = folder / LOG_NAME
    if log.is_file():
        run = _of_log(folder)
        if run.starts or run.logs:
            return run
    state = _newest_state(folder)
    if state is None:
        why = "has no readable line" if log.is_file() else "does not exist"
        raise ReportError(
            f"hf_zero: {folder} contains no run to report: {LOG_NAME} {why}, and there is no {STATE_NAME}, here or in "
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
    known = _CHECKS.get(line["kind"], {})
    return {name: value for name, value in line.items() if name not in known or known[name](value)}


def _begin(run: RunLines, start: Line) -> None:
    """Drops the lines replaced by a start: all lines for a new run, the lines after the starting step for a resumed one."""
    step = start["step"]
    last = max((line["step"] for line in run.steps), default=0)
    if step == 0 and run.starts:
        run.earlier += len(run.starts)
        run.starts = []
    run.taken_again += max(0, last - step) if step else 0
    for name in _LISTS.values():
        setattr(run, name, [line for line in getattr(run, name) if 0 < line["step"] <= step])
    # Each start begins these counts at zero.
    run.comm = []
    run.starts.append(start)
    run.end = None


def _newest_state(folder: Path) -> Path | None:
    found = [path for path in folder.glob(f"checkpoint-*/{STATE_NAME}") if _CHECKPOINT.fullmatch(path.parent.name)]
    found.sort(key=lambda path: int(path.parent.name.rpartition("-")[2]))
    own = folder / STATE_NAME
    # Trainer writes the state in the output folder itself at the end.
    return own if own.is_file() else found[-1] if found else None


def _of_state(folder: Path, path: Path) -> RunLines:
    try:
        history = read_mapping(path).get("log_history")
    except CheckpointError as error:
        raise ReportError(str(error)) from error
    if not isinstance(history, list):
        raise ReportError(f"hf_zero: {path} has no log_history, so there is no run to report.")
    run = RunLines(folder=folder, has_log=False)
    for entry in history:
        if isinstance(entry, Mapping) and is_step(entry.get("step")):
            values = {name: value for name, value in entry.items() if is_number(value)}
            run.logs.append({"kind": "log", "step": entry["step"], "values": values})
    return run
