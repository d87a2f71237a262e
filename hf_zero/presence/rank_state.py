"""The state of a rank: its current collective, or its line of the script."""

import gc
import linecache
import os
import sys
import threading
import traceback
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

_OURS = str(Path(__file__).parents[1]) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets")
"""Libraries that may be used from a source checkout, where no metadata shows that they are installed."""
_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))
_INNERMOST = 20
"""Number of frames of a stack that are shown."""


class ScriptCollective(str):
    """The name of a function of torch.distributed called by the script itself."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"script's own torch.distributed.{self[:]}"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank's answer about itself.

    Attributes:
        waits_in: the collective of hf_zero in which the rank waits or is failing.
        kind: the kind of this collective, if it belongs to training.
        seconds: duration of the wait.
        failure: the reason of the failure, if the collective is failing.
        torch_call: the function of torch.distributed that the rank is in, outside of hf_zero.
        is_in_barrier: whether this function is a barrier of all ranks.
        line: the current line of the script.
        begun: how often each kind of collective was started.
        holds: the module or the parameters of the bucket of `waits_in`.
        phase: the current part of training (backward, evaluate, ...), and the step.
        starts: how often each collective was started, by its name.
        stack, recent: the stack of the main thread, and the last collectives. Like `starts`, these are empty unless requested.
    """

    waits_in: str | None
    kind: str | None
    seconds: float
    failure: str | None
    torch_call: str | None
    line: str
    begun: dict[str, int]
    is_in_barrier: bool = False
    holds: str = ""
    phase: str = ""
    starts: dict[str, int] = field(default_factory=dict)
    stack: str = ""
    recent: tuple[str, ...] = ()

    @property
    def collective(self) -> str | None:
        """Names the awaited collective and the part of training; None outside of a collective."""
        if self.waits_in is not None:
            return f"{self.waits_in}{in_brackets(self.holds, self.phase)}"
        return None if self.torch_call is None else f"{ScriptCollective(self.torch_call)}{in_brackets(self.phase)}"

    def __str__(self) -> str:
        at = in_brackets(self.holds, self.phase, self.line)
        if self.failure is not None:
            return f"gave up waiting in the {self.waits_in} after {self.seconds:.0f} s: {self.failure}{at}"
        if self.waits_in is not None:
            return f"has waited {self.seconds:.0f} s in the {self.waits_in}{at}"
        if self.torch_call is not None:
            return f"is in the {ScriptCollective(self.torch_call)}{at}"
        return f"is in no collective{at}"


def script_line() -> tuple[str, str | None]:
    """Returns the main thread's line of the script, and the function of torch.distributed called there."""
    frame, torch_call = script_frame()
    return "" if frame is None else _in_words(frame, frame.f_lineno), torch_call


def script_frame() -> tuple[FrameType | None, str | None]:
    """Returns the main thread's innermost frame, preferably in the script, and the function of torch.distributed inside."""
    frame = innermost = _main_frame()
    torch_call = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(_COLLECTIVES) and frame.f_code.co_name != "wrapper":
            torch_call = frame.f_code.co_name
        if _is_of_script(frame):
            return frame, torch_call
        frame = frame.f_back
    return innermost, torch_call


def is_in_barrier() -> bool:
    """Whether the main thread is in torch.distributed's barrier of all ranks."""
    frame = _main_frame()
    while frame is not None:
        if frame.f_code.co_name == "barrier" and frame.f_code.co_filename.endswith(_COLLECTIVES):
            # The frame's own module: this file is also used without torch.
            return frame.f_locals.get("group") in (None, frame.f_globals["GroupMember"].WORLD)
        frame = frame.f_back
    return False


def torch_call_in(trace: TracebackType | None) -> str | None:
    """Returns the function of torch.distributed with the error; None for other errors."""
    names = (
        frame.f_code.co_name for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_filename.endswith(_COLLECTIVES)
    )
    return next((name for name in names if name != "wrapper"), None)


def line_in(trace: TracebackType | None) -> str:
    """Returns the script's innermost line in a traceback."""
    lines = [(frame, number) for frame, number in traceback.walk_tb(trace) if _is_of_script(frame)]
    return _in_words(*lines[-1]) if lines else ""


def _is_of_script(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not path.startswith((_OURS, "<")) and (
        frame.f_globals.get("__name__") == "__main__" or not _is_library(path)
    )


def _is_library(path: str) -> bool:
    """Whether a file belongs to Python's own library or to an installed package.

    On a cluster, libraries may be in several folders: of the system, of a user, of `pip install --target`.
    """
    folders = [os.path.dirname(getattr(sys.modules.get(name), "__file__", None) or "") for name in _LIBRARIES]
    return path.startswith((_PYTHON, *(folder + os.sep for folder in folders if folder))) or _is_installed(path)


@cache
def _is_installed(path: str) -> bool:
    """Whether a folder above a file was installed by pip."""
    return any(next(folder.glob("*.dist-info"), None) is not None for folder in Path(path).parents)


def _main_frame() -> FrameType | None:
    """Returns the main thread's innermost frame."""
    main, collects = threading.main_thread().ident, gc.isenabled()
    if main is None:
        return None
    # A garbage collection inside of `_current_frames` (Python before 3.11.8 and 3.12.2, gh-106883) may run a finalizer waiting
    # for another thread, whose end waits for `_current_frames`: a deadlock.
    gc.disable()
    try:
        return sys._current_frames().get(main)
    finally:
        if collects:
            gc.enable()


def in_brackets(*words: str) -> str:
    """Joins the non-empty words in brackets, with a leading space."""
    found = "; ".join(filter(None, words))
    return f" ({found})" if found else ""


def main_stack() -> str:
    """Formats the main thread's stack like a traceback."""
    frame = _main_frame()
    return "" if frame is None else "".join(traceback.format_stack(frame)[-_INNERMOST:])


def _in_words(frame: FrameType, number: int) -> str:
    path = frame.f_code.co_filename
    # getlines returns None for a file being looked up by another thread.
    lines = linecache.getlines(path) or []
    source = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"{Path(path).name}:{number}{f': {source[:100]}' if source else ''}"
