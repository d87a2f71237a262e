"""`hf-zero rendezvous`: serves the store of torchrun's rendezvous."""

import signal
from ipaddress import ip_address
from typing import Annotated

import typer

from ..config import ConfigError
from .output import said_plainly, say, say_json


def rendezvous(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the store; default: 29400; 0: any free port.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Name or address to listen on; default: this host's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print host and port as JSON.")] = False,
) -> None:
    """Serves the store of torchrun's c10d rendezvous, so that a run survives the loss of any node. Ends on Ctrl-C or SIGTERM.

    Start the store on a host outside the run's nodes (a login node, the batch step). Then start torchrun on each node with
    --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0.
    """
    # Import here: torch takes seconds to import, and the other commands do not need it.
    from ..presence.store import PORT, keep_store

    with said_plainly():
        try:
            store = keep_store(PORT if port is None else port, host)
        except OSError as error:
            raise ConfigError(
                f"hf-zero rendezvous: cannot listen on port {port} of {host or 'this host'} ({error}). Pass another --port, or "
                "the --host that agents reach."
            ) from error
    address = {"host": store.host, "port": store.port}
    if as_json:
        say_json(address)
    else:
        say(f"hf-zero rendezvous: --rdzv-endpoint {address['host']}:{address['port']} --rdzv-conf is_host=0")
        if ip_address(store.host).is_loopback:
            say(
                "Only agents on this host can reach this address. Pass the --host that agents on other hosts can reach."
            )
    # Wait until SIGTERM or Ctrl-C ends the process.
    signal.pause()
