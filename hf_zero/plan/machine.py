"""What accelerators, links and disks do in a second, for the forecast of a step's time."""

from dataclasses import dataclass

_GB = 10**9

_ACCELERATORS = {
    # By a part of the device's name, the longer names of one family first.
    "B200": (2250, 1125, 8000),
    "H200": (989, 67, 4800),
    "H100 NVL": (835, 60, 3900),
    "H100 PCIe": (756, 51, 2000),
    "H100": (989, 67, 3350),
    "A100-PCIE-40GB": (312, 19.5, 1555),
    "A100-SXM4-40GB": (312, 19.5, 1555),
    "A100": (312, 19.5, 2039),
    "L40S": (362, 91.6, 864),
    "L4": (121, 30.3, 300),
    "A10G": (70, 35, 600),
    "A10": (125, 31.2, 600),
    "RTX 4090": (165, 82.6, 1008),
    "RTX 3090": (71, 35.6, 936),
    "RTX A6000": (155, 38.7, 768),
    "V100": (125, 15.7, 900),
    "T4": (65, 8.1, 320),
}
"""What makers' data sheets say, without sparsity: TFLOPS of 16-bit and of 32-bit matrix products, GB/s of memory."""

_REACHED_FLOPS, _REACHED_BANDWIDTH = 0.45, 0.75
"""The parts of these that kernels reach."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with accelerators, and the links between them.

    The constants of latency and the default rates are those of comm/cost.py, from the tables that NCCL chooses its algorithms by.

    Attributes:
        nodes, ranks_a_node: each rank has one accelerator.
        flops: floating-point operations a second that a rank's kernels reach in forward and backward: a part of what its maker
            says, `peak_flops`.
        call_s: of starting a collective; `step_s` of a step of its ring inside a node, `step_between_s` between two.
        node_bytes_a_second: that a ring moves inside a node.
        link_bytes_a_second: of the links between nodes, for each rank of a node: a ring goes over all of them.
        memory_bytes_a_second: of the accelerator's memory, which an optimizer's step reads and writes.
        host_bytes_a_second: between an accelerator and host memory.
        host_step_bytes_a_second: of state that a rank's part of a host steps.
        disk_bytes_a_second: of a node's disk.
    """

    nodes: int = 1
    ranks_a_node: int = 8
    flops: float = 140e12
    peak_flops: float = 312e12
    call_s: float = 8.4e-6
    step_s: float = 3.4e-6
    step_between_s: float = 9.6e-6
    node_bytes_a_second: float = 235 * _GB
    link_bytes_a_second: float = 25 * _GB
    memory_bytes_a_second: float = 1500 * _GB
    host_bytes_a_second: float = 20 * _GB
    host_step_bytes_a_second: float = 10 * _GB
    disk_bytes_a_second: float = 3 * _GB

    @classmethod
    def of(cls, accelerator: str, *, nodes: int, ranks_a_node: int, is_16_bit: bool) -> "Machine":
        """Hosts with accelerators of a name, as the driver says the name; an unknown one counts as an A100.

        Args:
            is_16_bit: matrix products are of bfloat16 or float16.
        """
        name = next((each for each in _ACCELERATORS if each in accelerator), "A100")
        in_16_bit, in_32_bit, gb_a_second = _ACCELERATORS[name]
        peak = 1e12 * (in_16_bit if is_16_bit else in_32_bit)
        return cls(
            nodes=nodes,
            ranks_a_node=ranks_a_node,
            peak_flops=peak,
            flops=_REACHED_FLOPS * peak,
            memory_bytes_a_second=_REACHED_BANDWIDTH * gb_a_second * _GB,
        )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_a_node

    def latency_s(self, ranks: int, nodes: int) -> float:
        """Of a collective over a ring of `ranks` on `nodes`."""
        between = nodes - 1
        return self.call_s + (ranks - 1 - between) * self.step_s + between * self.step_between_s

    def bytes_a_second(self, ranks: int, nodes: int) -> float:
        """That a ring moves: the slower of its two levels."""
        if nodes == 1:
            return self.node_bytes_a_second
        return min(self.node_bytes_a_second, self.link_bytes_a_second * ranks / nodes)

    def collective_s(self, nbytes: float, ranks: int, nodes: int) -> float:
        """Of a reduce-scatter or an all-gather of `nbytes` in all: latency, and bytes by bandwidth."""
        if ranks == 1 or not nbytes:
            return 0.0
        return self.latency_s(ranks, nodes) + nbytes * (ranks - 1) / ranks / self.bytes_a_second(ranks, nodes)
