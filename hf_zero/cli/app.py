"""`hf-zero`: the command line, and its commands beside those on folders."""

import json
import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from ..checkpoint.files import replace_file, shown
from ..config import ConfigError
from ..config.checks import cut_name
from ..extras import extra
from ..versions import __version__
from .checkpoints import (
    LONGEST_LINE,
    Dtype,
    Json,
    console,
    consolidate,
    convert,
    inspect,
    push,
    refuse_special,
    said_plainly,
    say,
    say_error,
    say_json,
    verify,
)

# ---- `hf-zero doctor` ----

_STYLES = {"good": "green", "hint": "yellow", "bad": "bold red", "absent": "dim"}


def doctor(
    folder: Annotated[Path, typer.Option(help="Measure the disk of this folder.")] = Path("."),
    processes: Annotated[
        int | None, typer.Option(min=2, help="Number of ranks to start for measuring the links.")
    ] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Number of ranks that hold one copy of the model together.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the measurements of disk and links.")] = False,
    as_json: Json = False,
) -> None:
    """Checks versions, devices, limits, disk, links and conflicting settings, and advises on each. Exits with 1 on a fault."""
    with said_plainly():
        found = extra("diagnose", "doctor")(folder, processes, tp_size=tp_size, measure=not quick)
    if as_json:
        say_json(json.loads(found.to_json()))
    else:
        table = Table(title="hf-zero doctor", title_justify="left")
        for column in ("what", "", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for finding in found.findings:
            status = Text(finding.status, style=_STYLES[finding.status])
            table.add_row(Text(finding.subject), status, Text(finding.value), Text(finding.advice))
        console.print(table)
        faults = [finding.subject for finding in found.faults]
        say(f"{len(faults)} wrong: {', '.join(faults)}" if faults else "nothing is wrong")
    if not found.is_good:
        raise typer.Exit(1)


class MixedPrecision(str, Enum):
    """The values of mixed precision, as accelerate spells them."""

    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


# ---- Options of `hf-zero parity` and `hf-zero run`, which start ranks ----

Script = Annotated[
    list[str], typer.Argument(help="A Python file, or a module's name after -m, and the script's own arguments.")
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")]
Processes = Annotated[int | None, typer.Option(help="Number of ranks; default: one for each GPU, or two on a CPU.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Train on the CPU, even on a machine with GPUs.")]
Precision = Annotated[MixedPrecision | None, typer.Option(help="Precision of autocast.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port on which the ranks meet.")]
SequenceRanks = Annotated[int | None, typer.Option(help="Number of ranks that compute a sequence together (sp_size).")]


# ---- `hf-zero parity` ----

_PARAMETERS_SHOWN = 10


def parity(
    script: Script,
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3), a YAML file, or settings; default: HF_ZERO_CONFIG.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Largest relative difference that passes; default: by the settings."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for a script that sets none.")] = 0,
    module: Module = False,
    num_processes: Processes = None,
    cpu: Cpu = False,
    mixed_precision: Precision = None,
    port: Port = None,
    sp: SequenceRanks = None,
    as_json: Json = False,
) -> None:
    """Runs an unmodified script without and with the engine and compares the first steps. Exits with 1 if the steps differ."""
    with said_plainly():
        try:
            report = extra("diagnose", "parity_of_script")(
                extra("diagnose", "words_of")(script, zero, is_module=module),
                steps=steps,
                tolerance=tolerance,
                seed=seed,
                processes=num_processes,
                cpu=cpu,
                mixed_precision=None if mixed_precision is None else mixed_precision.value,
                port=port,
                sp=sp,
            )
        except extra("diagnose", "ParityError") as error:
            say_error(str(error))
            # Not 1, which says that the steps differ: here nothing could be compared.
            raise typer.Exit(2) from error
    if as_json:
        say_json(report.to_dict())
    else:
        for line in report.lines():
            say(line)
        if not report.equal:
            console.print(_table(report))
    if not report.passed:
        raise typer.Exit(1)


def _table(report: Any) -> Table:
    """The parameters that are furthest apart, by a `ParityReport`."""
    table = Table("parameter", "largest difference of a gradient", "of the parameter itself")
    names = sorted(
        report.gradients.keys() | report.parameters.keys(),
        key=lambda name: -max(report.gradients.get(name, 0.0), report.parameters.get(name, 0.0)),
    )
    for name in names[:_PARAMETERS_SHOWN]:
        table.add_row(Text(name), f"{report.gradients.get(name, 0.0):.3g}", f"{report.parameters.get(name, 0.0):.3g}")
    return table


# ---- `hf-zero plan` ----


def plan(
    model: Annotated[str, typer.Argument(help="A name on the Hub, a folder, or a config.json. No weights are read.")],
    gpus: Annotated[int, typer.Option(help="Number of accelerators of a node, one rank each.")] = 1,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    tp_size: Annotated[int, typer.Option(help="Number of ranks over which each layer is split.")] = 1,
    ep_size: Annotated[int, typer.Option(help="Number of ranks over which a mixture's experts are split.")] = 1,
    sp_size: Annotated[int, typer.Option(help="Number of ranks that compute a sequence together.")] = 1,
    gpu_memory: Annotated[
        str, typer.Option(help="Memory of an accelerator, such as 24GB; with --cpu, of a rank.")
    ] = "24GB",
    host_memory: Annotated[str | None, typer.Option(help="Host memory of a node for offload.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk space of a node for offload.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for training on CPUs.")] = False,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a row; default: the model's longest row, at most 2048.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of rows in a rank's micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Number of micro-batches in a step.")] = 1,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of the parameters; 16-bit parameters have fp32 masters.")
    ] = Dtype.float32,
    mixed_precision: Annotated[MixedPrecision, typer.Option(help="Autocast, as in accelerate.")] = MixedPrecision.no,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Count activation checkpointing.")] = False,
    chunked_loss: Annotated[
        bool,
        typer.Option(
            "--chunked-loss", help="Count a loss in chunks (TRL's, Liger's or torch's), without whole logits."
        ),
    ] = False,
    offload_activations: Annotated[
        bool, typer.Option("--offload-activations", help="Count activations in host memory (offload.activations: cpu).")
    ] = False,
    lora: Annotated[int | None, typer.Option(help="LoRA rank of adapters on all linear layers (needs peft).")] = None,
    link_gbps: Annotated[float, typer.Option(help="Rate of all links of a node to other nodes together.")] = 1600.0,
    peak_tflops: Annotated[float, typer.Option(help="Peak TFLOP/s of an accelerator, from its data sheet.")] = 312.0,
    utilisation: Annotated[float, typer.Option(help="The fraction of --peak-tflops that kernels reach.")] = 0.45,
    write: Annotated[Path | None, typer.Option(help="Write the recommended settings to this YAML file.")] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Draw the memory of all set-ups to this file (needs matplotlib)."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the bytes by kind, those of saves and loads, and waits, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Shows the memory and step time of each stage and offload setting, and recommends one. Exits with 1 if nothing fits."""
    options: dict[str, Any] = {
        "gpus": gpus,
        "nodes": nodes,
        "tp_size": tp_size,
        "ep_size": ep_size,
        "sp_size": sp_size,
        "gpu_memory": gpu_memory,
        "host_memory": host_memory,
        "disk": disk,
        "on_cpu": cpu,
        "seq": seq,
        "accumulation": accumulation,
        "dtype": dtype.value,
        "mixed_precision": mixed_precision.value,
        "checkpointing": checkpointing,
        "chunked_loss": chunked_loss,
        "offload_activations": offload_activations,
        "lora": lora,
        "link_gbps": link_gbps,
        "peak_tflops": peak_tflops,
        "utilisation": utilisation,
    }
    with said_plainly():
        refuse_special(write, png)
        found = extra("planner", "make_plan")(model, batch=batch, **options)
        if write is not None and found.settings is not None:
            replace_file(write, found.yaml())
        if as_json:
            say_json(found.to_dict())
        else:
            for line in extra("planner", "header")(found, verbose=verbose):
                say(line)
            console.print(extra("planner", "table_of")(found, console, verbose=verbose))
            for line in found.choice.why:
                say(line)
        # Last: without matplotlib, the plan is printed all the same.
        if png is not None:
            extra("planner", "draw")(found, png)
    if found.settings is None:
        raise typer.Exit(1)
    if not as_json:
        for path in (each for each in (write, png) if each is not None):
            say(str(path))


# ---- `hf-zero migrate` ----


def migrate(
    source: Annotated[Path, typer.Argument(help="DeepSpeed's JSON file, an accelerate config, or an FSDP config.")],
    write: Annotated[Path | None, typer.Option(help="Write the config of hf_zero to this new YAML file.")] = None,
    as_json: Json = False,
) -> None:
    """Translates a config of DeepSpeed, accelerate or FSDP, and lists each key as mapped, not needed or not supported."""
    with said_plainly():
        found = extra("foreign", "migrate")(source)
        if write is not None:
            try:
                # Mode "x" follows no link.
                with write.open("x", encoding="utf-8") as file:
                    file.write(found.yaml)
            except FileExistsError as error:
                raise ConfigError(f"hf_zero: {write} is there already; name a new file.") from error
    if as_json:
        lists = {
            name: [asdict(key) for key in getattr(found, name)] for name in ("mapped", "not_needed", "not_supported")
        }
        say_json(
            {"source": found.source, "yaml": found.yaml, "config": found.config.to_dict(), "written": write, **lists}
        )
        return
    _say_list("mapped", found.mapped)
    _say_list("not needed", found.not_needed)
    _say_list("not supported", found.not_supported)
    say(f"# of a config of {found.source}" + (f", written to {write}" if write is not None else ""))
    for line in found.yaml.splitlines():
        say(line)


def _say_list(name: str, keys: Sequence[Any]) -> None:
    if keys:
        say(f"{name}:")
    for key in keys:
        say(shown(f"  {key.key}: {key.said}", LONGEST_LINE))


# ---- `hf-zero rendezvous` ----


def rendezvous(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the store; default: 29400; 0: any free port.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Name or address to listen on; default: this host's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print host and port as JSON.")] = False,
) -> None:
    """Serves the store of torchrun's c10d rendezvous, so that a run survives the loss of any node. Ends on Ctrl-C or SIGTERM.

    Start the store on a host outside the run's nodes (a login node, the batch step). Then start torchrun on each node with
    --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0.
    """
    # Here, not above: the command line answers without the seconds that importing torch takes.
    from ..comm.store import PORT, keep_store

    with said_plainly():
        try:
            store = keep_store(PORT if port is None else port, host)
        except OSError as error:
            raise ConfigError(
                f"hf-zero rendezvous: port {port} of {host or 'this host'} cannot be had ({error}). Give another --port, or the "
                "--host that agents reach."
            ) from error
    place = {"host": store.host, "port": store.port}
    if as_json:
        say_json(place)
    else:
        say(f"hf-zero rendezvous: --rdzv-endpoint {place['host']}:{place['port']} --rdzv-conf is_host=0")
        if ip_address(store.host).is_loopback:
            say("Only agents of this host reach it there. Give the --host by which the others do.")
    # SIGTERM and Ctrl-C end it.
    signal.pause()


# ---- `hf-zero report` ----


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run: Trainer's output_dir, or the folder of zero_log.jsonl.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write; default: zero_report.html in FOLDER.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes one HTML page about a training run: loss, speed, time, memory, traffic and faults."""
    with said_plainly():
        refuse_special(output)
        write_page = extra("report", "write_page")
        try:
            if as_json:
                found = extra("report", "make_report")(folder).as_json()
                say_json(found | ({} if output is None else {"page": write_page(folder, output)}))
            else:
                say(str(write_page(folder, output)))
        except extra("report", "ReportError") as error:
            say_error(str(error))
            raise typer.Exit(1) from error


# ---- `hf-zero run` ----

# All that follows the script's name is the script's own. An unknown option before it is an error of `hf-zero run`.
SCRIPT_WORDS = {"allow_interspersed_args": False}


def run(
    script: Script,
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3, auto), a YAML file, or settings; default: HF_ZERO_CONFIG.")
    ] = None,
    module: Module = False,
    num_processes: Processes = None,
    cpu: Cpu = False,
    mixed_precision: Precision = None,
    port: Port = None,
    sp: SequenceRanks = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the command and its environment instead of starting it.")
    ] = False,
) -> None:
    """Trains an unmodified script with the engine: `hf-zero run --zero 2 train.py --its-own arguments`.

    If --zero is a YAML file of accelerate, the file also sets the number of ranks and the precision.
    """
    from ..integrations.launcher import launch_of, of_accelerate

    with said_plainly():
        said = of_accelerate(zero)
        zero = said.get("zero", zero)
        words = [*(("--zero", zero) if zero is not None else ()), *(("-m",) if module else ()), *script]
        launch = launch_of(
            words,
            processes=said.get("processes") if num_processes is None else num_processes,
            cpu=cpu,
            mixed_precision=said.get("mixed_precision") if mixed_precision is None else mixed_precision.value,
            port=port,
            sp=said.get("sp") if sp is None else sp,
        )
    if as_json:
        say_json({"command": launch.command, "environment": launch.environment})
        return
    variables = [f"{name}={value}" for name, value in launch.environment.items()]
    say_error(f"hf-zero run: {shlex.join([*variables, *launch.command])}")
    # In place of this process: the launcher gets its signals, and its exit status is the command's.
    os.execve(launch.command[0], launch.command, os.environ | launch.environment)


# ---- The command `hf-zero`: the list of its commands ----


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    """Leaves the type out of the help of flags: `--cpu`, not `--cpu <bool>`. A flag takes no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


class _Commands(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


app = typer.Typer(
    cls=_Commands,
    help="Training with hf_zero, and work on checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    # `--num_processes` is `--num-processes`, as accelerate has it.
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
    # Hidden, not removed: a script that still calls the command is told what took its place.
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
