"""What a plan is asked for: a machine and a training job."""

import math
from dataclasses import dataclass
from typing import Any

from ..config import parse_bytes
from ..config.checks import one_of, refuse, whole_number
from .machine import Machine

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that `make_plan` takes beside the model.

    Args:
        gpus: accelerators of a node, one rank each.
        nodes: hosts.
        tp_size: ranks over which each layer is split, as transformers does it.
        ep_size: ranks over which experts are split; 1, where they are split as other layers.
        gpu_memory: of an accelerator, in bytes or as `24GB`; on the CPU, what a rank may take.
        host_memory: of a node, for what is offloaded; None plans without it.
        disk: of a node, likewise.
        on_cpu: the ranks train on the host.
        seq: length of a row; None is the model's longest, up to 2048.
        batch: rows of a micro-batch on a rank.
        accumulation: micro-batches of a step.
        dtype: of the parameters. A 16-bit one is trained through an fp32 master.
        mixed_precision: `no`, or accelerate's and Trainer's `bf16` and `fp16`.
        checkpointing: activations are recomputed in backward.
        lora: rank of adapters on all linear layers; None trains everything.
        link_gbps: of each node's links to the others, together.
        peak_tflops: what the accelerator's maker says for the dtype of the matrix products.
        utilisation: the part of it that kernels reach.
    """

    gpus: int = 1
    nodes: int = 1
    tp_size: int = 1
    ep_size: int = 1
    gpu_memory: int | str = "24GB"
    host_memory: int | str | None = None
    disk: int | str | None = None
    on_cpu: bool = False
    seq: int | None = None
    batch: int = 1
    accumulation: int = 1
    dtype: str = "float32"
    mixed_precision: str = "no"
    checkpointing: bool = False
    lora: int | None = None
    link_gbps: float = 1600.0
    peak_tflops: float = 312.0
    utilisation: float = 0.45

    def __post_init__(self):
        for name in ("gpus", "nodes", "batch", "accumulation", "tp_size", "ep_size"):
            whole_number(name, getattr(self, name), 1)
        if self.gpus % self.tp_size:
            raise refuse("tp_size", self.tp_size, f"a number that divides the {self.gpus} ranks of a node")
        if self.ep_size > 1 and (self.ep_size % self.tp_size or self.world_size % self.ep_size):
            fitting = f"a multiple of tp_size ({self.tp_size}) that divides the {self.world_size} ranks"
            raise refuse("ep_size", self.ep_size, f"1, {fitting}")
        for name in ("seq", "lora"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        for name in ("gpu_memory", "host_memory", "disk"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        one_of("dtype", self.dtype, DTYPES)
        one_of("mixed_precision", self.mixed_precision, ("no", "bf16", "fp16"))
        for name in ("on_cpu", "checkpointing"):
            one_of(name, getattr(self, name), (True, False))
        for name, most in (("link_gbps", math.inf), ("peak_tflops", math.inf), ("utilisation", 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value <= most and math.isfinite(value)):
                raise refuse(name, value, "a number above 0" + (f", up to {most:g}" if most < math.inf else ""))

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def data_ranks(self) -> int:
        """Ranks with batches of their own, each `tp_size` counted once: over them hf_zero shards."""
        return self.world_size // self.tp_size

    @property
    def is_split(self) -> bool:
        """Whether a rank has a part of the model only."""
        return self.tp_size > 1 or self.ep_size > 1

    @property
    def machine(self) -> Machine:
        """Rates of what the ranks run on."""
        link = self.link_gbps / 8 * 1e9 / self.gpus
        if self.on_cpu:
            return host_machine(nodes=self.nodes, ranks_a_node=self.gpus, link_bytes_a_second=link)
        return Machine(
            nodes=self.nodes,
            ranks_a_node=self.gpus,
            peak_flops=self.peak_tflops * 1e12,
            flops=self.peak_tflops * 1e12 * self.utilisation,
            link_bytes_a_second=link,
        )

    def bytes_of(self, name: str) -> int | None:
        """Of a memory, for each rank."""
        value: Any = getattr(self, name)
        return None if value is None else value // (1 if name == "gpu_memory" else self.gpus)


def host_machine(*, nodes: int, ranks_a_node: int, link_bytes_a_second: float = 1e9) -> Machine:
    """Ranks on the CPU, a core each, which talk by gloo: rates seen on a server of 2024, to compare set-ups by."""
    return Machine(
        nodes=nodes,
        ranks_a_node=ranks_a_node,
        flops=40e9,
        peak_flops=80e9,
        call_s=2e-4,
        step_s=5e-5,
        step_between_s=1e-4,
        node_bytes_a_second=1.5e9,
        link_bytes_a_second=link_bytes_a_second,
        memory_bytes_a_second=6e9,
        host_bytes_a_second=6e9,
        host_step_bytes_a_second=6e9,
        disk_bytes_a_second=1e9,
    )
