"""Chooses the transport for a backend and a device."""

import torch

from ..device import clock
from .collectives import CollectiveTransport
from .control.lookout import watch_over
from .groups.groups import Groups
from .ledger import Ledger
from .local import LocalTransport
from .point_to_point import PointToPointTransport
from .transport import Transport


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


def choose_step_transport(transport: Transport, groups: Groups, device: torch.device, timeout_s: float) -> Transport:
    """The transport of the ranks that take each step together: all of `transport`'s, unless outer steps are for the rest.

    Both count in one ledger.
    """
    if groups.outer is None:
        return transport
    return choose_transport(groups.of_a_step(), device, timeout_s, transport.ledger)
