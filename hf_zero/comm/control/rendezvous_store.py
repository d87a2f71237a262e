"""The store through which torchrun's agents find each other, kept by a process that is on none of the nodes that may be lost."""

import socket
from datetime import timedelta

import torch.distributed as dist

PORT = 29400
"""torchrun's own default."""

_TIMEOUT_S = 60


def keep_store(port: int = PORT, host: str | None = None) -> dist.TCPStore:
    """Opens a store on one address of this host; it lives as long as what is returned.

    Agents reach it by `torchrun --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0 ...`. Without it one of the
    agents keeps the store, and the loss of its node ends all of them.

    Args:
        port: 0 is a free one, which the store's `port` tells.
        host: name or address to listen on; by default this host's name. 0.0.0.0 is all addresses: torch's store answers everyone
            who reaches it.

    Raises:
        OSError: the name has no address here, or the port is taken.
    """
    family, _, _, _, place = socket.getaddrinfo(host or socket.gethostname(), port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family)
    address, port = listener.getsockname()[:2]
    timeout = timedelta(seconds=_TIMEOUT_S)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
