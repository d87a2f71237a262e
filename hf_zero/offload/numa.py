"""Which cores of a host are near a rank's accelerator: NUMA nodes, as the system describes them."""

import re
from pathlib import Path

SYSTEM = Path("/sys")
"""Where Linux tells of devices: https://www.kernel.org/doc/html/latest/admin-guide/abi-stable.html."""


def near_cores(
    allowed: frozenset[int],
    *,
    pci_address: str | None,
    local_rank: int,
    ranks: int,
    system: Path = SYSTEM,
) -> frozenset[int] | None:
    """The cores that a rank's host steps are to run on; None where the system chooses.

    They are those of the node of the rank's accelerator. Ranks without one, or with one of which the system
    knows no node, are dealt over the nodes evenly, neighbours together. The system chooses on a host with one node or with
    no word on nodes, and where a launcher has confined the rank to one node already.

    Args:
        allowed: cores that this process may run on.
        pci_address: of the rank's accelerator, "0000:3b:00.0"; None without one.
        local_rank: of the `ranks` on this host.
        system: where /sys is.
    """
    reachable = {node: cores & allowed for node, cores in _nodes(system).items() if cores & allowed}
    if len(reachable) < 2:
        return None
    near = None if pci_address is None else _node_of(pci_address, system)
    if near not in reachable:
        near = sorted(reachable)[local_rank * len(reachable) // ranks]
    return reachable[near]


def _nodes(system: Path) -> dict[int, frozenset[int]]:
    """Node → its cores. Some nodes are memory alone, and have none."""
    found = {}
    for folder in (system / "devices" / "system" / "node").glob("node[0-9]*"):
        listed = folder / "cpulist"
        cores = _parsed(listed.read_text()) if listed.is_file() else frozenset()
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def _node_of(pci_address: str, system: Path) -> int | None:
    """A device's node; -1 where the firmware says nothing, None where the system does not."""
    told = system / "bus" / "pci" / "devices" / pci_address / "numa_node"
    return int(told.read_text()) if told.is_file() else None


def _parsed(listed: str) -> frozenset[int]:
    """`0-3,8` → 0, 1, 2, 3, 8."""
    spans = re.finditer(r"(\d+)(?:-(\d+))?", listed)
    return frozenset(core for span in spans for core in range(int(span[1]), int(span[2] or span[1]) + 1))
