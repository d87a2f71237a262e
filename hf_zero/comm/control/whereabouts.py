"""Where a rank is: in which collective, or in which line of the script."""

import linecache
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parents[2])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What a rank says of itself when it is asked.

    Attributes:
        waits_in: the collective of hf_zero that it waits in, or is failing in.
        kind: of that collective, where it is one of training's.
        seconds: since when.
        failure: why that fails, where it does.
        torch_call: the function of torch.distributed that it is in by itself, outside of hf_zero.
        line: of the script that it is in.
        begun: how often each kind of collective has been started.
    """

    waits_in: str | None
    kind: str | None
    seconds: float
    failure: str | None
    torch_call: str | None
    line: str
    begun: dict[str, int]

    def __str__(self) -> str:
        at = f" ({self.line})" if self.line else ""
        if self.failure is not None:
            return f"gave up in the {self.waits_in} after {self.seconds:.0f} s: {self.failure}{at}"
        if self.waits_in is not None:
            return f"has waited {self.seconds:.0f} s in the {self.waits_in}{at}"
        if self.torch_call is not None:
            return f"is in torch.distributed.{self.torch_call}, which the script called by itself{at}"
        return f"is in no collective{at}"


def script_line() -> tuple[str, str | None]:
    """The line of the script that the main thread is in, and torch's collective that it called there by itself."""
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    innermost, torch_call = "", None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            torch_call = None
        elif path.endswith(_COLLECTIVES) and frame.f_code.co_name != "wrapper":
            torch_call = frame.f_code.co_name
        innermost = innermost or _in_words(frame)
        if not path.startswith((_PACKAGE, *_LIBRARIES, "<")):
            return _in_words(frame), torch_call
        frame = frame.f_back
    return innermost, torch_call


def _in_words(frame: FrameType) -> str:
    path, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(path, number).strip()
    return f"{Path(path).name}:{number}{f': {source[:100]}' if source else ''}"
