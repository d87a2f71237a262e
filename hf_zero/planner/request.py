"""The request for a plan: a machine, and a training job."""

import math
from dataclasses import dataclass, replace
from typing import Any

from ..config import parse_bytes
from ..config.checks import one_of, refuse, whole_number
from .search import Machine

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of `make_plan`, in addition to the model.

    Args:
        gpus: accelerators of a node, one rank each.
        nodes: hosts.
        tp_size: ranks over which transformers splits each layer.
        ep_size: ranks over which experts are split; 1 if experts are split like other layers.
        sp_size: ranks that compute a sequence together, each a part of its tokens.
        gpu_memory: memory of an accelerator, in bytes or as `24GB`; on the CPU, the memory available to a rank.
        host_memory: memory of a node for offloading; None plans without host memory.
        disk: disk space of a node for offloading; None plans without a disk.
        on_cpu: whether the ranks train on the host.
        seq: length of a sample; None means the model's maximum, up to 2048.
        batch: samples of a micro-batch on a rank; with `sp_size`, the samples that the ranks of a sequence compute together.
        accumulation: micro-batches of a step.
        dtype: dtype of the parameters. 16-bit parameters are trained with fp32 masters.
        mixed_precision: `no`, or accelerate's and Trainer's `bf16` and `fp16`.
        checkpointing: whether activations are recomputed in backward.
        chunked_loss: whether the loss is computed in chunks, without whole logits.
        offload_activations: whether tensors saved by a forward stay in host memory until backward (`offload.activations: cpu`).
        lora: rank of adapters on all linear layers; None trains everything.
        link_gbps: Gbit/s of all links of a node to the other nodes together.
        node_gbps: Gbit/s sent by each rank to the other ranks of its node; None means NVLink's rate, or gloo's on a CPU.
        peak_tflops: the vendor's rate of the accelerator for the dtype of the matrix products.
        utilization: the part of this rate that kernels reach.
    """

    gpus: int = 1
    nodes: int = 1
    tp_size: int = 1
    ep_size: int = 1
    sp_size: int = 1
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
    chunked_loss: bool = False
    offload_activations: bool = False
    lora: int | None = None
    link_gbps: float = 1600.0
    node_gbps: float | None = None
    peak_tflops: float = 312.0
    utilization: float = 0.45

    def __post_init__(self):
        for name in ("gpus", "nodes", "batch", "accumulation", "tp_size", "ep_size", "sp_size"):
            whole_number(name, getattr(self, name), 1)
        if self.gpus % self.tp_size:
            raise refuse("tp_size", self.tp_size, f"a number that divides the {self.gpus} ranks of a node")
        if self.ep_size > 1 and (self.ep_size % self.tp_size or self.world_size % self.ep_size):
            fitting = f"a multiple of tp_size ({self.tp_size}) that divides the {self.world_size} ranks"
            raise refuse("ep_size", self.ep_size, f"1, {fitting}")
        if self.sp_size > 1 and self.is_split:
            raise refuse("sp_size", self.sp_size, "1 together with tp_size or ep_size")
        if self.world_size % self.sp_size:
            raise refuse("sp_size", self.sp_size, f"a number that divides the {self.world_size} ranks")
        for name in ("seq", "lora"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        for name in ("gpu_memory", "host_memory", "disk"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _memory(name, getattr(self, name)))
        one_of("dtype", self.dtype, DTYPES)
        one_of("mixed_precision", self.mixed_precision, ("no", "bf16", "fp16"))
        for name in ("on_cpu", "checkpointing", "chunked_loss", "offload_activations"):
            one_of(name, getattr(self, name), (True, False))
        rates = ("link_gbps", "node_gbps", "peak_tflops")
        for name, most in (*((rate, math.inf) for rate in rates), ("utilization", 1.0)):
            value = getattr(self, name)
            if name == "node_gbps" and value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value <= most and math.isfinite(value)):
                raise refuse(name, value, "a number above 0" + (f", up to {most:g}" if most < math.inf else ""))

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def data_ranks(self) -> int:
        """Ranks with separate batches, each set of `tp_size` counted once. hf_zero shards over these ranks."""
        return self.world_size // self.tp_size

    @property
    def is_split(self) -> bool:
        """Whether a rank only has a part of the model."""
        return self.tp_size > 1 or self.ep_size > 1

    @property
    def machine(self) -> Machine:
        """Returns the rates of the ranks' machine."""
        link = self.link_gbps / 8 * 1e9 / self.gpus
        if self.on_cpu:
            machine = host_machine(nodes=self.nodes, ranks_a_node=self.gpus, link_bytes_a_second=link)
        else:
            machine = Machine(
                nodes=self.nodes,
                ranks_a_node=self.gpus,
                peak_flops=self.peak_tflops * 1e12,
                flops=self.peak_tflops * 1e12 * self.utilization,
                step_flops=self.peak_tflops * 1e12 * self.utilization,
                link_bytes_a_second=link,
            )
        if self.node_gbps is None:
            return machine
        return replace(machine, node_bytes_a_second=self.node_gbps / 8 * 1e9)

    def bytes_of(self, name: str) -> int | None:
        """Returns the bytes of a kind of memory for each rank."""
        value: Any = getattr(self, name)
        return None if value is None else value // (1 if name == "gpu_memory" else self.gpus)


def _memory(name: str, value: Any) -> int:
    """Parses a size in bytes. A bare number such as 24 was meant as gigabytes, so sizes below 1 MiB are refused."""
    nbytes = parse_bytes(name, value)
    if nbytes < 2**20:
        raise refuse(name, value, "1 MiB or more, with its unit: '24GB'")
    return nbytes


def host_machine(*, nodes: int, ranks_a_node: int, link_bytes_a_second: float = 1e9) -> Machine:
    """Describes ranks on the CPU with one core each and gloo between them: rates of a server of 2024, to compare set-ups."""
    return Machine(
        nodes=nodes,
        ranks_a_node=ranks_a_node,
        flops=40e9,
        peak_flops=80e9,
        step_flops=40e9,
        call_s=2e-4,
        step_s=5e-5,
        step_between_s=1e-4,
        node_bytes_a_second=1.5e9,
        link_bytes_a_second=link_bytes_a_second,
        memory_bytes_a_second=6e9,
        host_bytes_a_second=6e9,
        host_step_bytes_a_second=6e9 * ranks_a_node,
        host_step_flops=40e9 * ranks_a_node,
        disk_bytes_a_second=1e9,
    )
