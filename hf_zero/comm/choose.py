"""Chooses the transport for a backend and a device, and makes data parallel groups."""

import torch

from ..device import clock
from .collectives import CollectiveTransport
from .control.lookout import watch_over
from .groups.groups import Groups
from .ledger import Ledger
from .local import LocalTransport
from .point_to_point import PointToPointTransport
from .transport import DataParallelGroup, Transport


def choose_transport(groups: Groups, device: torch.device, timeout_s: float, ledger: Ledger | None = None) -> Transport:
    """Nothing for one rank, point to point for gloo on the host, the backend's own collectives otherwise."""
    is_alone = groups.world_size == 1
    if ledger is None:
        ledger = Ledger(clock(device), None if is_alone else watch_over(groups), is_timed=device.type == "cpu")
    if is_alone:
        return LocalTransport(ledger)
    if groups.backend == "gloo" and device.type == "cpu":
        return PointToPointTransport(groups, timeout_s, ledger)
    return CollectiveTransport(groups, ledger)


def choose_group(groups: Groups, device: torch.device, ledger: Ledger | None = None) -> DataParallelGroup:
    """The ranks of `groups` with their transport, and apart those that take each step together; both count in one ledger."""
    transport = choose_transport(groups, device, groups.timeout_s, ledger)
    in_step, own = groups.of_a_step(), transport
    if in_step is not groups:
        own = choose_transport(in_step, device, groups.timeout_s, transport.ledger)
    return DataParallelGroup(groups=in_step, transport=own, all_groups=groups, all_transport=transport)
