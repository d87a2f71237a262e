"""The log of a run: one JSON object a line, appended and never changed, so that what was written survives any end.

[Note: lines of the log]
Each line has a `kind`, the wall clock's `time` in seconds and the optimizer `step` that it was written behind.

| kind | what it tells |
|---|---|
| `start` | training begins or goes on: ranks, settings, bytes by the plan |
| `steps` | some steps together: seconds, rows, tokens, loss, norm, learning rate, bytes sent, seconds waited |
| `log` | what the script or Trainer logged |
| `memory` | bytes that the rank holds, by kind |
| `comm` | calls, bytes and waits by kind of collective, since the line `start` |
| `trace` | one step's time, span by span |
| `stall` | seconds for which a save held training up |
| `end` | how the run ended |

A float that is not finite is written as the text "nan", "inf" or "-inf", which JSON has no number for.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from ..checkpoint.format.text import shown

LOG_NAME = "zero_log.jsonl"
PAGE_NAME = "zero_report.html"
_LAST_STEP = 2**53
_LONGEST_TEXT = 2000


class LogFile:
    """Appends to the log in a folder, which is made if it is missing.

    Each line goes to the system at once: a process that is killed leaves all of them but perhaps a part of the last. Where one
    cannot be written, as on a full disk, that is said once and no more are: training goes on.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_NAME
        is_cut_off = _ends_within_a_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if is_cut_off:
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
    """A value as JSON has it: numbers that are not finite, and objects, as text."""
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
    """The lines of the log in a folder with their numbers, from 1; None for one that is no line of ours, or is cut off."""
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


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value counts steps. Beyond 2**53, a float does not tell a step from the next."""
    return type(value) is int and 0 <= value <= _LAST_STEP


def _as_meant(value: Any) -> Any:
    """Numbers that are not finite are text in JSON; other text is made fit to be shown."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else shown(value, _LONGEST_TEXT)
    if isinstance(value, dict):
        return {shown(name): _as_meant(inner) for name, inner in value.items()}
    return [_as_meant(inner) for inner in value] if isinstance(value, list) else value


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
