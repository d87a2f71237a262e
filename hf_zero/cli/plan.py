"""`hf-zero plan`."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .output import Dtype, Json, console, said_plainly, say, say_json


class MixedPrecision(str, Enum):
    """As accelerate calls it."""

    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


def plan(
    model: Annotated[str, typer.Argument(help="A name of the Hub, a folder, or a config.json. No weights are read.")],
    gpus: Annotated[int, typer.Option(help="Accelerators of a node, one rank each.")] = 1,
    nodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    tp_size: Annotated[int, typer.Option(help="Ranks over which each layer is split.")] = 1,
    ep_size: Annotated[int, typer.Option(help="Ranks over which a mixture's experts are split.")] = 1,
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
    lora: Annotated[int | None, typer.Option(help="Rank of adapters on all linear layers (needs peft).")] = None,
    link_gbps: Annotated[float, typer.Option(help="Of each node's links to the others, together.")] = 1600.0,
    peak_tflops: Annotated[float, typer.Option(help="Of an accelerator, as its maker says.")] = 312.0,
    utilisation: Annotated[float, typer.Option(help="The part of that which kernels reach.")] = 0.45,
    write: Annotated[Path | None, typer.Option(help="Write the recommended set-up to this YAML file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the memory of all set-ups (needs matplotlib).")] = None,
    as_json: Json = False,
) -> None:
    """What each stage and tier needs for a model on a machine, which one to take, and why. Exits with 1 where nothing fits."""
    from ..integrations.planning.chart import draw
    from ..integrations.planning.planner import make_plan
    from ..integrations.planning.tables import header, table_of

    options: dict[str, Any] = {
        "gpus": gpus,
        "nodes": nodes,
        "tp_size": tp_size,
        "ep_size": ep_size,
        "gpu_memory": gpu_memory,
        "host_memory": host_memory,
        "disk": disk,
        "on_cpu": cpu,
        "seq": seq,
        "accumulation": accumulation,
        "dtype": dtype.value,
        "mixed_precision": mixed_precision.value,
        "checkpointing": checkpointing,
        "lora": lora,
        "link_gbps": link_gbps,
        "peak_tflops": peak_tflops,
        "utilisation": utilisation,
    }
    with said_plainly():
        found = make_plan(model, batch=batch, **options)
        if png is not None:
            draw(found, png)
        if write is not None and found.settings is not None:
            write.write_text(found.yaml(), encoding="utf-8")
        if as_json:
            say_json(found.to_dict())
        else:
            for line in header(found):
                say(line)
            console.print(table_of(found, console))
            for line in found.choice.why:
                say(line)
    if found.settings is None:
        raise typer.Exit(1)
    if not as_json:
        for path in (each for each in (write, png) if each is not None):
            say(str(path))
