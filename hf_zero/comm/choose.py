"""Chooses the transport for a backend and a device, and whether gathers read peers' memory."""

import sys

import torch

from ..config import AUTO, ConfigError, ZeroConfig
from ..device import clock
from .all_or_none import all_or_none
from .collectives import CollectiveTransport
from .control.lookout import watch_over
from .groups.groups import Groups
from .ledger import Ledger
from .local import LocalTransport
from .peers.host_peers import HostPeers
from .peers.peer_memory import PeerMemory
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


def choose_peer_memory(
    config: ZeroConfig, groups: Groups, transport: Transport, everyone: Transport, device: torch.device
) -> PeerMemory | None:
    """What gathers read in place of a collective, if `config.comm.peer_memory` wants it and all ranks can. Collective.

    With `auto`, rank 0 says why it is not to be had.

    Args:
        groups, transport: of the ranks that take each step together.
        everyone: the transport of all ranks.

    Raises:
        ConfigError: it is asked for with `always`, and not to be had.
    """
    wanted = config.comm.peer_memory
    if wanted == "none" or groups.shard_size == 1:
        return None
    hindrance = config.hindrance_to_peer_memory

    def find() -> PeerMemory:
        if hindrance is not None:
            raise RuntimeError(hindrance)
        return _peer_memory(groups, transport, device, config.comm.timeout_s)

    try:
        return all_or_none(
            everyone.exchange,
            find,
            expected=(OSError, RuntimeError),
            error=lambda rank, reason: _NotAvailableError(f"rank {rank}: {reason}"),
        )
    except _NotAvailableError as fault:
        if wanted != AUTO:
            raise ConfigError(
                f"hf_zero config: `comm.peer_memory: {wanted}` cannot be had ({fault}). Set it to auto or none: parameters then "
                "travel through the process group."
            ) from fault
        if groups.shard.ranks[groups.shard.place] == 0:
            print(f"hf_zero: comm.peer_memory: auto is none ({fault})", file=sys.stderr, flush=True)
        return None


class _NotAvailableError(Exception):
    """Peers' memory cannot be read on some rank."""


def _peer_memory(groups: Groups, transport: Transport, device: torch.device, timeout_s: float) -> PeerMemory:
    if device.type == "cpu":
        return HostPeers(groups, transport, timeout_s)
    if device.type == "cuda" and groups.backend == "gloo":
        raise RuntimeError("the process group of the GPUs is gloo's, as for several ranks on one GPU; NCCL's is needed")
    if device.type == "cuda":
        # It rests on a private module of torch, which no other run should depend on.
        from .peers.device_peers import DevicePeers

        return DevicePeers(groups, transport, device, timeout_s)
    raise RuntimeError(f"there is no such memory on {device.type} devices")
