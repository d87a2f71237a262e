"""`hf-zero plan`: settings within the machine's memory, and their costs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.files import replace_file
from ..extras import extra
from .launching import MixedPrecision
from .output import Dtype, Json, console, refuse_special, said_plainly, say, say_json


def plan(
    model: Annotated[str, typer.Argument(help="A name on the Hub, a folder, or a config.json. No weights are read.")],
    gpus: Annotated[int, typer.Option(help="Number of accelerators per node, one rank each.")] = 1,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    tp_size: Annotated[int, typer.Option(help="Number of ranks over which each layer is split.")] = 1,
    ep_size: Annotated[int, typer.Option(help="Number of ranks over which a mixture's experts are split.")] = 1,
    sp_size: Annotated[int, typer.Option(help="Number of ranks that compute a sequence together.")] = 1,
    gpu_memory: Annotated[
        str, typer.Option(help="Memory of one accelerator, such as 24GB; with --cpu, of one rank.")
    ] = "24GB",
    host_memory: Annotated[str | None, typer.Option(help="Host memory of a node for offload.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk space of a node for offload.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for training on CPUs.")] = False,
    seq: Annotated[
        int | None, typer.Option(help="Tokens per row; default: the model's longest row, at most 2048.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of rows in a rank's micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Number of micro-batches in a step.")] = 1,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of the parameters; 16-bit parameters have fp32 masters.")
    ] = Dtype.float32,
    mixed_precision: Annotated[MixedPrecision, typer.Option(help="Autocast, as in accelerate.")] = MixedPrecision.no,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Plan with activation checkpointing.")] = False,
    chunked_loss: Annotated[
        bool,
        typer.Option(
            "--chunked-loss", help="Plan with a chunked loss (TRL's, Liger's or torch's), without whole logits."
        ),
    ] = False,
    offload_activations: Annotated[
        bool,
        typer.Option("--offload-activations", help="Plan with activations in host memory (offload.activations: cpu)."),
    ] = False,
    lora: Annotated[int | None, typer.Option(help="LoRA rank of adapters on all linear layers (needs peft).")] = None,
    link_gbps: Annotated[float, typer.Option(help="Total rate of a node's links to other nodes.")] = 1600.0,
    node_gbps: Annotated[
        float | None,
        typer.Option(
            help="Rate of a rank's link to the other ranks of its node, from `hf-zero doctor`; default: NVLink's."
        ),
    ] = None,
    peak_tflops: Annotated[float, typer.Option(help="Peak TFLOP/s of an accelerator, from its data sheet.")] = 312.0,
    utilization: Annotated[float, typer.Option(help="The fraction of --peak-tflops that kernels reach.")] = 0.45,
    write: Annotated[Path | None, typer.Option(help="Write the recommended settings to this YAML file.")] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Write a chart of each set-up's memory to this file (needs matplotlib)."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show bytes by kind, bytes during saves and loads, and waits.")
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
        "node_gbps": node_gbps,
        "peak_tflops": peak_tflops,
        "utilization": utilization,
    }
    with said_plainly():
        refuse_special(write, png)
        found = extra("planner", "make_plan")(model, batch=batch, **options)
        if write is not None and found.settings is not None:
            replace_file(write, found.yaml())
        if as_json:
            say_json(found.to_dict())
        else:
            _say(found, verbose=verbose)
        # Draw the picture last: the plan is then printed even without matplotlib.
        if png is not None:
            extra("planner", "draw")(found, png)
    if found.settings is None:
        raise typer.Exit(1)
    if not as_json:
        for path in (each for each in (write, png) if each is not None):
            say(str(path))


def _say(found: Any, *, verbose: bool) -> None:
    """Prints a plan as a table with its reasons."""
    for line in extra("planner", "header")(found, verbose=verbose):
        say(line)
    console.print(extra("planner", "table_of")(found, console, verbose=verbose))
    for line in found.choice.why:
        say(line)
