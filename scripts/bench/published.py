"""The cost model next to published throughputs of data-parallel training on hundreds of accelerators.

    python scripts/bench/published.py

Each group of points has the software and the cluster of one paper. Two figures of a group are fitted to some of its points, as
marked in the table: the operations per second of kernels, and the bytes per second of collectives between nodes. All other points
are predicted. All are GPT models with activation checkpointing, whose four passes the papers count as operations.

Sources:
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021
    (arXiv:2104.04473), Table 2: ZeRO-3 by DeepSpeed without model parallelism, global batches of 1536 rows (2240 and 2560 for
    530 B), rows of 2048, DGX A100 nodes of 8 with 8 x 200 Gbit/s.
    Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023 (arXiv:2304.11277), section 5.4:
    GPT-175B, rows of 2048, nodes of 8 A100 with 2 Tbit/s.

Exits with status 1 if a predicted point is further than 20 % from the published one.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from harness import RESULTS, print_table, read_options, write_record

from hf_zero.config import ZeroConfig
from hf_zero.planner.search import Machine, Piece, Work, simulate

MOST_ERROR = 0.20
LENGTH = 2048
A100_FLOPS = 312e12


class Shape(NamedTuple):
    """A GPT."""

    layers: int
    width: int
    vocabulary: int = 51200

    @property
    def layer_numel(self) -> int:
        return 12 * self.width**2

    @property
    def numel(self) -> int:
        return self.layers * self.layer_numel + self.vocabulary * self.width

    def forward_flops(self, rows: int) -> float:
        """Matrix products of a forward, by the formula of the first paper: a quarter of its count for a step."""
        tokens = rows * LENGTH
        attention = 1 + LENGTH / (6 * self.width) + self.vocabulary / (16 * self.layers * self.width)
        return 24 * tokens * self.layers * self.width**2 * attention


class Point(NamedTuple):
    """A published run. `tflops`: per accelerator, recomputation included."""

    name: str
    group: str
    shape: Shape
    gpus: int
    rows: int
    tflops: float
    fitted: bool = False


GPT_175B, GPT_530B = Shape(layers=96, width=12288), Shape(layers=105, width=20480)
POINTS = [
    Point("175 B", "DeepSpeed ZeRO-3", GPT_175B, gpus=384, rows=4, tflops=144, fitted=True),
    Point("175 B", "DeepSpeed ZeRO-3", GPT_175B, gpus=768, rows=2, tflops=88, fitted=True),
    Point("175 B", "DeepSpeed ZeRO-3", GPT_175B, gpus=1536, rows=1, tflops=44),
    Point("530 B", "DeepSpeed ZeRO-3", GPT_530B, gpus=640, rows=4, tflops=138),
    Point("530 B", "DeepSpeed ZeRO-3", GPT_530B, gpus=1120, rows=2, tflops=98),
    Point("530 B", "DeepSpeed ZeRO-3", GPT_530B, gpus=2240, rows=1, tflops=48),
    Point("175 B", "PyTorch FSDP", GPT_175B, gpus=128, rows=2, tflops=186, fitted=True),
    Point("175 B", "PyTorch FSDP", GPT_175B, gpus=128, rows=1, tflops=173),
]

RATES = {
    "DeepSpeed ZeRO-3": {"flops": 151e12, "link_bytes_a_second": 2.0e9},
    # Not fitted, but the links' own rate: no step in these points waits for communication.
    "PyTorch FSDP": {"flops": 188e12, "link_bytes_a_second": 2e12 / 8 / 8},
}
"""The fitted figures of each group."""


def predict(point: Point) -> dict[str, Any]:
    """Simulates a step of the point's run as stage 3 of this engine; returns its figures and their error."""
    shape, nodes = point.shape, point.gpus // 8
    machine = Machine(nodes=nodes, ranks_a_node=8, peak_flops=A100_FLOPS, **RATES[point.group])
    root, forward = shape.vocabulary * shape.width, shape.forward_flops(point.rows)
    sizes = [*[shape.layer_numel] * shape.layers, root]
    pieces = [Piece(numel=numel, reduce_bytes=2 * numel, gather_bytes=2 * numel) for numel in sizes]
    work = Work(
        forward_flops=forward,
        backward_flops=3 * forward,
        model_flops=3 * forward,
        step_bytes=shape.numel / point.gpus * 30,
    )
    step = simulate(pieces, ZeroConfig(stage=3), machine, work, ranks=point.gpus, nodes=nodes)
    tflops = step.flops_a_second / 1e12
    return {
        **{name: getattr(point, name) for name in ("name", "group", "gpus", "rows", "fitted")},
        "published_tflops": point.tflops,
        "simulated_tflops": tflops,
        **{name: getattr(step, name) for name in ("step_s", "exposed_s", "mfu")},
        "error": tflops / point.tflops - 1,
    }


def main() -> int:
    options = read_options(__doc__)
    found = [predict(point) for point in POINTS]
    columns = [
        *(("software", "group"), ("model", "name"), ("GPUs", "gpus"), ("rows", "rows")),
        *(("", lambda each: "fitted" if each["fitted"] else "predicted"), ("published", "published_tflops", "g")),
        *(("simulated", "simulated_tflops", ".0f"), ("error", "error", "+.0%")),
        *(("step", lambda each: f"{each['step_s']:.1f} s"), ("waits", lambda each: f"{each['exposed_s']:.1f} s")),
    ]
    print_table("TFLOP/s of an accelerator", columns, found)
    write_record(options.json or RESULTS / "published.json", {"torch": torch.__version__, "points": found})
    return int(any(abs(each["error"]) > MOST_ERROR for each in found if not each["fitted"]))


if __name__ == "__main__":
    sys.exit(main())
