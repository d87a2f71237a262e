"""Chooses the transport for a backend and a device, and makes data parallel groups."""

import torch

from ..presence.watchdog import watch_over
from ..queues import clock
from .collective import CollectiveTransport
from .groups import Groups
from .ledger import Ledger
from .local import LocalTransport
from .point_to_point import PointToPointTransport
from .transport import DataParallelGroup, Transport


def choose_transport(groups: Groups, device: torch.device, timeout_s: float, ledger: Ledger | None = None) -> Transport:
    """Chooses the transport: local for one rank, point to point for gloo on the host, otherwise the backend's collectives."""
    is_alone = groups.world_size == 1
    if ledger is None:
        ledger = Ledger(clock(device), None if is_alone else watch_over(groups), is_timed=device.type == "cpu")
    if is_alone:
        return LocalTransport(ledger)
    if groups.backend == "gloo" and device.type == "cpu":
        return PointToPointTransport(groups, timeout_s, ledger)
    return CollectiveTransport(groups, ledger)


def choose_group(groups: Groups, device: torch.device, ledger: Ledger | None = None) -> DataParallelGroup:
    """Makes the data parallel group of these ranks. With `comm.sync_every`, the ranks of a step get their own transport."""
    transport = choose_transport(groups, device, groups.timeout_s, ledger)
    in_step, own = groups.of_a_step(), transport
    if in_step is not groups:
        own = choose_transport(in_step, device, groups.timeout_s, transport.ledger)
    return DataParallelGroup(groups=in_step, transport=own, all_groups=groups, all_transport=transport)
