"""`hf-zero rendezvous`."""

import signal
import socket
from typing import Annotated

import typer

from ..config import ConfigError
from .output import said_plainly, say, say_json


def rendezvous(
    port: Annotated[int | None, typer.Option(help="Where agents reach it; 29400 by default, 0 is a free one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print host and port as JSON.")] = False,
) -> None:
    """Keeps the store of torchrun's c10d rendezvous until it is ended, so that the loss of any node is survived.

    Start it on a host that is not lost with a node (a login node, the batch step), then on each node torchrun with
    --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0.
    """
    import torch.distributed as dist

    from ..comm.control.rendezvous_store import keep_store

    with said_plainly():
        try:
            store = keep_store() if port is None else keep_store(port)
        except dist.DistNetworkError as error:
            raise ConfigError(f"hf-zero rendezvous: port {port} cannot be had on this host ({error}).") from error
    place = {"host": socket.gethostname(), "port": store.port}
    if as_json:
        say_json(place)
    else:
        say(f"hf-zero rendezvous: --rdzv-endpoint {place['host']}:{place['port']} --rdzv-conf is_host=0")
    # SIGTERM and Ctrl-C end it.
    signal.pause()
