"""The transport that suits a backend and a device, chosen once when the engine is built."""

from .collectives import CollectiveTransport
from .groups import Groups
from .local import LocalTransport
from .point_to_point import PointToPointTransport
from .transport import Transport


def choose_transport(groups: Groups, device_type: str, timeout_s: float) -> Transport:
    """Nothing for one rank, point to point for gloo on the host, the backend's own collectives otherwise."""
    if groups.world_size == 1:
        return LocalTransport()
    if groups.backend == "gloo" and device_type == "cpu":
        return PointToPointTransport(groups, timeout_s)
    return CollectiveTransport(groups)
