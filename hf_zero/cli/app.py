"""`hf-zero`: the command line, and its commands beside those on folders."""

import importlib.metadata
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

from ..checkpoint.files import shown
from ..config import ConfigError
from ..config.checks import cut_name
from ..extras import extra
from .checkpoints import (
    LONGEST_LINE,
    Dtype,
    Json,
    console,
    consolidate,
    convert,
    inspect,
    push,
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
    processes: Annotated[int | None, typer.Option(min=2, help="Ranks to start for the links.")] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Ranks that will hold one copy of the model together.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure disk and links.")] = False,
    as_json: Json = False,
) -> None:
    """Versions, devices, limits, disk, links, settings in conflict, each with what to do. Exits with 1 on a fault."""
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
            table.add_row(finding.subject, status, Text(finding.value), Text(finding.advice))
        console.print(table)
        faults = [finding.subject for finding in found.faults]
        say(f"{len(faults)} wrong: {', '.join(faults)}" if faults else "nothing is wrong")
    if not found.is_good:
        raise typer.Exit(1)


# ---- `hf-zero parity` ----

_PARAMETERS_SHOWN = 10


def parity(
    script: Annotated[
        list[str], typer.Argument(help="A Python file, or a module's name behind -m, and its own arguments.")
    ],
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3), a YAML file, or settings; else HF_ZERO_CONFIG.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Relative difference that passes; by default what is to be expected.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random numbers of a script that does not seed.")] = 0,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    num_processes: Annotated[
        int | None, typer.Option(help="Ranks; one for each GPU by default, or two on a CPU.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, whatever GPUs there are.")] = False,
    mixed_precision: Annotated[str | None, typer.Option(help="no, fp16 or bf16.")] = None,
    port: Annotated[int | None, typer.Option(help="Where the ranks meet.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Runs an unmodified script without and with the engine, and compares its first steps. Exits with 1 where they differ."""
    with said_plainly():
        try:
            report = extra("diagnose", "parity_of_script")(
                extra("diagnose", "words_of")(script, zero, is_module=module),
                steps=steps,
                tolerance=tolerance,
                seed=seed,
                processes=num_processes,
                cpu=cpu,
                mixed_precision=mixed_precision,
                port=port,
            )
        except extra("diagnose", "ParityError") as error:
            say_error(str(error))
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
        table.add_row(name, f"{report.gradients.get(name, 0.0):.3g}", f"{report.parameters.get(name, 0.0):.3g}")
    return table


# ---- `hf-zero plan` ----


class MixedPrecision(str, Enum):
    """The values of mixed precision, as accelerate spells them."""

    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


def plan(
    model: Annotated[str, typer.Argument(help="A name of the Hub, a folder, or a config.json. No weights are read.")],
    gpus: Annotated[int, typer.Option(help="Accelerators of a node, one rank each.")] = 1,
    nodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    tp_size: Annotated[int, typer.Option(help="Ranks over which each layer is split.")] = 1,
    ep_size: Annotated[int, typer.Option(help="Ranks over which a mixture's experts are split.")] = 1,
    sp_size: Annotated[int, typer.Option(help="Ranks that compute each sequence together, as with run's --sp.")] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Of an accelerator, such as 24GB; with --cpu, of a rank.")] = "24GB",
    host_memory: Annotated[str | None, typer.Option(help="Of a node, for what is offloaded.")] = None,
    disk: Annotated[str | None, typer.Option(help="Of a node, for what is offloaded.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The ranks train on the host.")] = False,
    seq: Annotated[
        int | None, typer.Option(help="Length of a row; the model's longest, up to 2048, by default.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows of a micro-batch on a rank.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the parameters; 16 bits are trained with fp32 masters.")
    ] = Dtype.float32,
    mixed_precision: Annotated[MixedPrecision, typer.Option(help="Autocast, as in accelerate.")] = MixedPrecision.no,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Activation checkpointing.")] = False,
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="A loss in chunks, without whole logits: TRL's, Liger's or torch's.")
    ] = False,
    offload_activations: Annotated[
        bool, typer.Option("--offload-activations", help="Activations in host memory (offload.activations: cpu).")
    ] = False,
    lora: Annotated[int | None, typer.Option(help="Rank of adapters on all linear layers (needs peft).")] = None,
    link_gbps: Annotated[float, typer.Option(help="Of each node's links to the others, together.")] = 1600.0,
    peak_tflops: Annotated[float, typer.Option(help="Of an accelerator, as its maker says.")] = 312.0,
    utilisation: Annotated[float, typer.Option(help="The part of that which kernels reach.")] = 0.45,
    write: Annotated[Path | None, typer.Option(help="Write the recommended set-up to this YAML file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the memory of all set-ups (needs matplotlib).")] = None,
    as_json: Json = False,
) -> None:
    """What each stage and tier needs for a model on a machine, which one to take, and why. Exits with 1 where nothing fits."""
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
        found = extra("planner", "make_plan")(model, batch=batch, **options)
        if png is not None:
            extra("planner", "draw")(found, png)
        if write is not None and found.settings is not None:
            write.write_text(found.yaml(), encoding="utf-8")
        if as_json:
            say_json(found.to_dict())
        else:
            for line in extra("planner", "header")(found):
                say(line)
            console.print(extra("planner", "table_of")(found, console))
            for line in found.choice.why:
                say(line)
    if found.settings is None:
        raise typer.Exit(1)
    if not as_json:
        for path in (each for each in (write, png) if each is not None):
            say(str(path))


# ---- `hf-zero migrate` ----


def migrate(
    source: Annotated[Path, typer.Argument(help="DeepSpeed's JSON file, an accelerate config, or an FSDP config.")],
    write: Annotated[Path | None, typer.Option(help="Write the config here to this new YAML file.")] = None,
    as_json: Json = False,
) -> None:
    """The equal config of hf_zero, with a word on every key: mapped, not needed, or not supported and what instead."""
    with said_plainly():
        found = extra("foreign", "migrate")(source)
        if write is not None:
            if write.exists():
                raise ConfigError(f"hf_zero: {write} is there already; name a new file.")
            write.write_text(found.yaml, encoding="utf-8")
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
    say(found.yaml.rstrip())


def _say_list(name: str, keys: Sequence[Any]) -> None:
    if keys:
        say(f"{name}:")
    for key in keys:
        say(shown(f"  {key.key}: {key.said}", LONGEST_LINE))


# ---- `hf-zero rendezvous` ----


def rendezvous(
    port: Annotated[int | None, typer.Option(help="Where agents reach it; 29400 by default, 0 is a free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Name or address to listen on; default: this host's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print host and port as JSON.")] = False,
) -> None:
    """Keeps the store of torchrun's c10d rendezvous until it is ended, so that the loss of any node is survived.

    Start it on a host that is not lost with a node (a login node, the batch step), then on each node torchrun with
    --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0.
    """
    from ..comm.arrivals import PORT, keep_store

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
    folder: Annotated[Path, typer.Argument(help="The folder of a run: Trainer's output_dir, or where its log is.")],
    output: Annotated[
        Path | None, typer.Option(help="The HTML file to write; zero_report.html in the folder by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes one HTML page of a training run: loss, speed, where time, memory and bytes went, and what went wrong."""
    with said_plainly():
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

# All that follows the script's name is the script's own.
SCRIPT_WORDS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def run(
    script: Annotated[
        list[str], typer.Argument(help="A Python file, or a module's name behind -m, and its own arguments.")
    ],
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3, auto), a YAML file, or settings; else HF_ZERO_CONFIG.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    num_processes: Annotated[
        int | None, typer.Option(help="Ranks; one for each GPU by default, or two on a CPU.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, whatever GPUs there are.")] = False,
    mixed_precision: Annotated[str | None, typer.Option(help="no, fp16 or bf16.")] = None,
    port: Annotated[int | None, typer.Option(help="Where the ranks meet.")] = None,
    sp: Annotated[int | None, typer.Option(help="Ranks that compute a sequence together.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the command and its environment instead of starting it.")
    ] = False,
) -> None:
    """Trains an unmodified script with the engine: `hf-zero run --zero 2 train.py --its-own arguments`.

    With a YAML file of accelerate behind --zero, the ranks and their precision are that file's, too.
    """
    from ..integrations.launcher import launch_of, of_accelerate

    with said_plainly():
        said = of_accelerate(zero)
        zero = said.get("zero", zero)
        words = [*(("--zero", zero) if zero is not None else ()), *(("-m",) if module else ()), *script]
        launch = launch_of(
            words,
            processes=num_processes or said.get("processes"),
            cpu=cpu,
            mixed_precision=mixed_precision or said.get("mixed_precision"),
            port=port,
            sp=sp or said.get("sp"),
        )
    if as_json:
        say_json({"command": launch.command, "environment": launch.environment})
        return
    variables = [f"{name}={value}" for name, value in launch.environment.items()]
    say_error(f"hf-zero run: {shlex.join([*variables, *launch.command])}")
    # In place of this process: the launcher gets its signals, and its exit status is the command's.
    os.execve(launch.command[0], launch.command, os.environ | launch.environment)


# ---- The command `hf-zero`: the list of its commands ----

app = typer.Typer(help="Training with hf_zero, and its checkpoints.", no_args_is_help=True, add_completion=False)
for command in (verify, inspect, consolidate, push, convert, migrate, plan, report, doctor, rendezvous):
    app.command()(command)
app.command(context_settings=SCRIPT_WORDS)(run)
app.command(context_settings=SCRIPT_WORDS)(parity)


@app.command("card", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def _card() -> None:
    say_error(cut_name("hf-zero card"))
    raise typer.Exit(1)


def _tell_version(wanted: bool) -> None:
    if wanted:
        console.print(f"hf-zero {importlib.metadata.version('hf-zero')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Training with hf_zero, and its checkpoints."""


def main() -> None:
    app()
