"""Which cores of a host are near a rank's accelerator: NUMA nodes, as the system describes them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ..config import AUTO, ConfigError

SYSTEM = Path("/sys")
"""Where Linux tells of devices: https://www.kernel.org/doc/html/latest/admin-guide/abi-stable.html."""


def near_cores(
    setting: int | Literal["auto", "none"],
    allowed: frozenset[int],
    *,
    pci_address: str | None,
    local_rank: int,
    ranks: int,
    system: Path = SYSTEM,
) -> frozenset[int] | None:
    """The cores that a rank's host steps are to run on; None where the system chooses.

    With `auto` they are those of the node of the rank's accelerator. Ranks without one, or with one of which the system
    knows no node, are dealt over the nodes evenly, neighbours together. The system chooses on a host with one node or with
    no word on nodes, and where a launcher has confined the rank to one node already.

    Args:
        setting: `offload.numa`: auto, none, or the number of a node.
        allowed: cores that this process may run on.
        pci_address: of the rank's accelerator, "0000:3b:00.0"; None without one.
        local_rank: of the `ranks` on this host.
        system: where /sys is.

    Raises:
        ConfigError: the node is not there, or this process may run on none of its cores.
    """
    if setting == "none":
        return None
    nodes = _nodes(system)
    if setting != AUTO:
        return _cores_of(setting, nodes, allowed)
    reachable = {node: cores & allowed for node, cores in nodes.items() if cores & allowed}
    if len(reachable) < 2:
        return None
    near = None if pci_address is None else _node_of(pci_address, system)
    if near not in reachable:
        near = sorted(reachable)[local_rank * len(reachable) // ranks]
    return reachable[near]


def _cores_of(node: int, nodes: Mapping[int, frozenset[int]], allowed: frozenset[int]) -> frozenset[int]:
    if node not in nodes:
        there = f"has {', '.join(map(str, sorted(nodes)))}" if nodes else "tells of none in /sys"
        raise ConfigError(
            f"hf_zero config: `offload.numa` is {node}, and this host has no such node with cores: it {there}. Set one that is "
            "there, or auto, or none."
        )
    if not nodes[node] & allowed:
        raise ConfigError(
            f"hf_zero config: `offload.numa` is {node}, and this process may run on none of that node's cores "
            f"({_ranges(nodes[node])}), but on {_ranges(allowed)}: a launcher, a container or a batch system has confined it. "
            "Give it cores of that node, or set `offload.numa` to auto or none."
        )
    return nodes[node] & allowed


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


def _ranges(cores: frozenset[int]) -> str:
    """0, 1, 2, 3, 8 → `0-3,8`, as the system writes it."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
