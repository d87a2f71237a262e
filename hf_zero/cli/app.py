"""The command `hf-zero` and the list of its commands."""

import difflib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..config.checks import cut_name
from ..versions import __version__
from .consolidate import consolidate
from .convert import convert
from .doctor import doctor
from .inspect import inspect
from .migrate import migrate
from .output import console, say_error
from .parity import parity
from .plan import plan
from .push import push
from .rendezvous import rendezvous
from .report import report
from .run import SCRIPT_WORDS, run
from .verify import verify


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    """Leaves the type out of the help of flags: `--cpu`, not `--cpu <bool>`. A flag takes no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


_MEANT = {
    "--stage": "--zero",
    "--gpus": "--num-processes",
    "--num-gpus": "--num-processes",
    "--nproc": "--num-processes",
    "--nproc-per-node": "--num-processes",
    "--bf16": "--mixed-precision",
    "--fp16": "--mixed-precision",
    "--dtype": "--mixed-precision",
    "--master-port": "--port",
    "--main-process-port": "--port",
    "--config": "--zero",
    "--config-file": "--zero",
    "--zero-stage": "--zero",
    "-n": "--num-processes",
    "-np": "--num-processes",
}
"""Options of other launchers → the same option here."""

_SEVERAL_NODES = (
    "hf-zero run starts ranks on one machine. On several machines, start `-m hf_zero.run --zero 2 train.py` "
    "with torchrun"
)
_OTHER_ENGINE = "hf_zero replaces that engine: remove the option. `hf-zero migrate` translates another engine's config"
_HAS_ALL_STAGES = "The plan shows all stages"
_ANSWERS = {
    "run": {
        **dict.fromkeys(
            ("--num-machines", "--machine-rank", "--main-process-ip", "--nnodes", "--node-rank", "--rdzv-endpoint"),
            _SEVERAL_NODES,
        ),
        **dict.fromkeys(("--deepspeed", "--fsdp", "--use-deepspeed", "--use-fsdp", "--ddp"), _OTHER_ENGINE),
        "--multi-gpu": "It needs no option: one rank starts on each GPU",
        "--standalone": "It needs no option: the ranks of one machine meet on a free port",
    },
    "plan": dict.fromkeys(("--zero", "--stage"), _HAS_ALL_STAGES),
    "hf-zero": dict.fromkeys(
        ("--zero", "--num-processes", "--cpu", "--mixed-precision"),
        "Put it after the command: hf-zero run --zero 2 train.py",
    ),
}
"""A command → options that it does not have → what to do instead."""

_COMMANDS = {
    "launch": "run",
    "train": "run",
    "start": "run",
    "env": "doctor",
    "test": "doctor",
    "estimate-memory": "plan",
    "merge-weights": "consolidate",
    "upload": "push",
    "config": "migrate",
}
"""Commands of accelerate and others → the command here."""


def _explain_option(error: Any, command: Any, ctx: Any) -> None:
    """Adds the remedy for an unknown option. The parser would also propose `--cpu` for `--gpus`, and `--seq` for `--stage`."""
    options = [option for parameter in command.get_params(ctx) for option in parameter.opts if option != "--"]
    name = str(getattr(error, "option_name", ""))
    answer = _ANSWERS.get("run" if ctx.info_name == "parity" else str(command.name or "hf-zero"), {}).get(name)
    if answer is not None:
        error.message, error.possibilities = f"{error.message}. {answer}.", []
        return
    meant = _MEANT.get(name)
    # Names of a few letters are all similar, such as `--fsdp` and `--sp`.
    near = difflib.get_close_matches(name.strip("-"), [option.strip("-") for option in options], n=1, cutoff=0.75)
    error.possibilities = [meant] if meant in options else [f"--{each}" for each in near]


class _Explained:
    """Explains unknown options, for commands and groups of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        command: Any = super()
        return _flags_without_type(command.get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        command: Any = super()
        try:
            return command.parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):
                _explain_option(error, self, ctx)
            raise


class _Command(_Explained, TyperCommand):
    """A command."""


class _Commands(_Explained, TyperGroup):
    """The commands of `hf-zero`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            meant = _COMMANDS.get(args[0]) if args else None
            if meant is not None and hasattr(error, "message"):
                # The parser would propose `plan` for `launch`.
                error.message = f"No such command {args[0]!r}. Use `hf-zero {meant}`."
            raise


app = typer.Typer(
    cls=_Commands,
    help="Train with hf_zero, and work with checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    # Accept `--num_processes` as `--num-processes`, like accelerate.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
for command, settings in (
    # In the order of use: before a run, the run, after it, and from other engines.
    (doctor, {}),
    (plan, {}),
    (run, SCRIPT_WORDS),
    (parity, SCRIPT_WORDS),
    (report, {}),
    (inspect, {}),
    (verify, {}),
    (consolidate, {}),
    (push, {}),
    (migrate, {}),
    (convert, {}),
    (rendezvous, {}),
):
    app.command(cls=_Command, context_settings=settings)(command)


@app.command("card", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def _card() -> None:
    # The command is hidden, not removed: an old script which calls it gets an error with the replacement.
    say_error(cut_name("hf-zero card"))
    raise typer.Exit(1)


def _tell_version(wanted: bool) -> None:
    if wanted:
        console.print(f"hf-zero {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Training with hf_zero, and work on checkpoints."""


def main() -> None:
    app()
