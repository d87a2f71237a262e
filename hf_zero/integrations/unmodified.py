"""Installs the engine in a script that does not import hf_zero, for `hf_zero.run`."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from ..config import ConfigError, ZeroConfig
from ..hooks.replaced import AfterImport, replaced
from ..presence.error_hook import write_error_file
from .launcher import ScriptCall, script_call
from .run_record import RunRecord

if TYPE_CHECKING:
    import torch

    from .plugin import ZeroPlugin


# ---- The engine in every Accelerator, and so in every Trainer, of a process while a script runs ----

_OTHER_ENGINES = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
}


class Door:
    """Installs the engine in each Accelerator built while the door is open.

    Args:
        config: the config of all engines.

    Attributes:
        record: what was built.
    """

    def __init__(self, config: ZeroConfig):
        self.record = RunRecord(config=config)
        self._plugin: ZeroPlugin | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Installs the engine in Accelerators built inside; accelerate and torch are unchanged afterwards."""
        with ExitStack() as entered:
            calls: dict[str, Callable[[ModuleType], None]] = {
                "torch": lambda _: self._watch_steps(entered),
                "accelerate": lambda accelerate: self._seat(entered, accelerate.Accelerator),
            }
            # After the script's own import: importing accelerate earlier would change the script's set-up.
            entered.enter_context(AfterImport(calls))
            yield

    def _seat(self, entered: ExitStack, accelerator_class: type) -> None:
        build: Callable[..., None] = vars(accelerator_class)["__init__"]

        @wraps(build)
        def __init__(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            # Before accelerate notes plugins in environment variables, which outlive an error.
            _refuse_other_engines(kwargs)
            # Made before accelerate initializes NCCL.
            plugin = self._made_plugin()
            if plugin.take_sequences_of(kwargs.get("parallelism_config")):
                # accelerate supports sequence parallelism only through DeepSpeed, and not on a CPU.
                kwargs["parallelism_config"] = plugin
            build(accelerator, *args, **kwargs)
            plugin.install_for_run(accelerator, self.record)

        entered.enter_context(replaced(accelerator_class, "__init__", __init__))

    def _made_plugin(self) -> "ZeroPlugin":
        if self._plugin is None:
            # Imported here, so the script decides when to import torch and accelerate.
            from .plugin import ZeroPlugin

            self._plugin = ZeroPlugin(self.record.config)
        return self._plugin

    def _watch_steps(self, entered: ExitStack) -> None:
        from .step_watch import StepWatch

        def judge(optimizer: "torch.optim.Optimizer", engine: object | None) -> bool:
            if engine is None and self.record.engines == 0:
                raise ConfigError(
                    f"hf_zero: {type(optimizer).__name__} steps without the engine: {self._why_not()}. {WHAT_IT_TAKES}"
                )
            # A ZeroEngine built by the script itself counts, too.
            self.record.engines = max(self.record.engines, 1)
            return True

        entered.callback(StepWatch(judge).close)

    def refuse_unmet(self) -> None:
        """Raises `ConfigError` if the script ended without using the engine; prints a message after evaluations only."""
        if self.record.engines:
            return
        if not self.record.models:
            raise ConfigError(f"hf_zero: the script ended without the engine: {self._why_not()}. {WHAT_IT_TAKES}")
        if os.environ.get("RANK", "0") == "0":
            print(
                "hf_zero: the script has prepared models for evaluation only and trained nothing, so nothing was sharded.",
                file=sys.stderr,
                flush=True,
            )

    def _why_not(self) -> str:
        if self.record.accelerators == 0:
            return "it built neither an Accelerator nor a Trainer in this process"
        if self.record.models == 0:
            return "it built an Accelerator, but prepared no model"
        return "it prepared a model without its optimizer"


WHAT_IT_TAKES = (
    "hf_zero.run gives the engine to scripts that call accelerator.prepare(model, optimizer), or that train with a Trainer, "
    "in the processes that the launcher starts. For any other loop, build a ZeroEngine(model, [optimizer], 2) in it."
)


def _refuse_other_engines(arguments: dict[str, Any]) -> None:
    for name, engine in _OTHER_ENGINES.items():
        if arguments.get(name) is not None:
            raise ConfigError(
                f"hf_zero: the script builds an Accelerator with {name}, for {engine}. Two engines cannot own one model. Run the "
                f"script without hf_zero.run, or remove {name}."
            )


# ---- Runs a script as Python does, with the door open: own arguments, folder, traceback and exit status ----

_HELP = ("-h", "--help")
_NOT_THE_SCRIPTS = {os.path.normpath(file) for file in (__file__, runpy.__file__)}


def main() -> None:
    """Runs `python -m hf_zero.run`. Always raises SystemExit, unless the script ended normally."""
    try:
        call = script_call(sys.argv[1:])
    except ConfigError as error:
        write_error_file(str(error), str(error))
        # Only on rank 0, because all ranks have the same command line.
        raise SystemExit(str(error) if os.environ.get("RANK", "0") == "0" else 1) from None
    run_script(call)


def run_script(call: ScriptCall) -> None:
    """Runs a script to its end as `__main__`, with the engine in all of its Accelerators.

    Raises:
        SystemExit: the script's own; or 1 after an error, which was printed, or if the script did not use the engine.
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
            # Let Python end by the signal, as the sender expects.
            raise
        except BaseException as error:
            _say_and_end(error)
    # A script asked for its help may end without an engine.
    if own_end is None or not set(_HELP) & set(call.arguments):
        try:
            opening.refuse_unmet()
        except ConfigError as error:
            _say_and_end(error)
    if own_end is not None:
        raise own_end


def run_as_main(call: ScriptCall) -> None:
    """Runs a script in this process exactly as Python would."""
    with _as_called(call):
        if call.is_module:
            runpy.run_module(call.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(call.script, run_name="__main__")


@contextmanager
def _as_called(call: ScriptCall) -> Iterator[None]:
    """Sets `sys.argv` and `sys.path` as Python would set them for the script."""
    argv, path = sys.argv, list(sys.path)
    # For a module, runpy replaces its name by its file.
    sys.argv = [call.script, *call.arguments]
    if not call.is_module and not getattr(sys.flags, "safe_path", False):
        # Replace the first entry, the folder in which `python -m` was called.
        sys.path[0] = os.path.dirname(os.path.abspath(os.path.realpath(call.script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _say_and_end(error: BaseException) -> None:
    """Prints an error as Python does, starting at the script's first frame, and exits with status 1."""
    if isinstance(error, ConfigError):
        # Imported here because this imports torch, and the script decides when to import torch.
        from ..presence.error_hook import ErrorHook

        ErrorHook.installed()
    trace = _of_the_script(error.__traceback__)
    # Exit handlers read these to learn of the failure.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(1) from None


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(filename: str) -> bool:
    return filename == "<frozen runpy>" or os.path.normpath(filename) in _NOT_THE_SCRIPTS
