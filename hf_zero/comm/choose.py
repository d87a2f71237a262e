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
    if groups.world_size == 1:
        return LocalTransport(ledger or Ledger(clock(device)))
    ledger = ledger or Ledger(clock(device), watch_over(groups))
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
