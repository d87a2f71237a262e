"""Runs a script as Python does, with the door open: its own arguments, folder, traceback and exit status."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ...comm.control.end_of_process import write_error_file
from ...config import ConfigError
from . import door
from .command_line import ScriptCall, script_call
from .door import Door

_HELP = ("-h", "--help")
_NOT_THE_SCRIPTS = {os.path.normpath(file) for file in (__file__, door.__file__, runpy.__file__)}


def main() -> None:
    """What `python -m hf_zero.run` does. Ends by SystemExit, except for a script that has come to its end by itself."""
    try:
        call = script_call(sys.argv[1:])
    except ConfigError as error:
        write_error_file(str(error), str(error))
        # The ranks have the same command line.
        raise SystemExit(str(error) if os.environ.get("RANK", "0") == "0" else 1) from None
    run_script(call)


def run_script(call: ScriptCall) -> None:
    """Runs a script to its end as `__main__`, with the engine in all of its Accelerators.

    Raises:
        SystemExit: the script's own, or 1 after an error, which has been shown, or where the script met no engine.
    """
    opening = Door(call.config)
    own_end = None
    with opening.opened():
        try:
            run_as_main(call)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
            own_end = end
        except KeyboardInterrupt:
            # Python ends by the signal, as whoever sent it expects.
            raise
        except BaseException as error:
            _say_and_end(error)
    if own_end is None or not set(_HELP) & set(call.arguments):
        try:
            opening.refuse_unmet()
        except ConfigError as error:
            _say_and_end(error)
    if own_end is not None:
        raise own_end


def run_as_main(call: ScriptCall) -> None:
    """Runs a script as Python would, in this process, and nothing else."""
    with _as_called(call):
        if call.is_module:
            runpy.run_module(call.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(call.script, run_name="__main__")


@contextmanager
def _as_called(call: ScriptCall) -> Iterator[None]:
    """Inside, `sys.argv` and `sys.path` are what Python gives the script."""
    argv, path = sys.argv, list(sys.path)
    # For a module, runpy puts the module's file in place of its name.
    sys.argv = [call.script, *call.arguments]
    if not call.is_module and not getattr(sys.flags, "safe_path", False):
        # There stands the folder that `python -m` was called in.
        sys.path[0] = os.path.dirname(os.path.abspath(os.path.realpath(call.script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _say_and_end(error: BaseException) -> None:
    """Shows an error as Python does, from the script's first line on, and ends with status 1."""
    if isinstance(error, ConfigError):
        # Here, not above: it imports torch, and the script has its own time for that.
        from ...comm.control.last_words import LastWords

        LastWords.installed()
    trace = _of_the_script(error.__traceback__)
    # What runs at the exit of a process finds out by these that it failed.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(1) from None


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(filename: str) -> bool:
    return filename == "<frozen runpy>" or os.path.normpath(filename) in _NOT_THE_SCRIPTS
