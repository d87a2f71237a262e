"""The store through which torchrun's agents find each other, kept by a process that is on none of the nodes that may be lost."""

from datetime import timedelta

import torch.distributed as dist

PORT = 29400
"""torchrun's own default."""

_TIMEOUT_S = 60


def keep_store(port: int = PORT) -> dist.TCPStore:
    """Opens a store on all of this host's addresses; it lives as long as what is returned.

    Agents reach it by `torchrun --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0 ...`. Without it one of the
    agents keeps the store, and the loss of its node ends all of them.

    Args:
        port: 0 is a free one, which the store's `port` tells.

    Raises:
        dist.DistNetworkError: the port is taken.
    """
    return dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S))
