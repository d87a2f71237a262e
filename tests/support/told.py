"""How ranks of a test wait for one another outside of any collective, and for no longer than it takes."""

import time

from torch.distributed.distributed_c10d import _get_default_store

_LONGEST_S = 100.0


def tell(what: str) -> None:
    """Says so to the ranks that wait for it."""
    _get_default_store().set(f"told {what}", "yes")


def wait_until_told(*what: str) -> None:
    """Returns once each of these has been told, by whichever rank."""
    store, deadline_s = _get_default_store(), time.monotonic() + _LONGEST_S
    # Looked for in turns: a call that waits would hold up other threads' calls of the store.
    while not store.check([f"told {each}" for each in what]):
        assert time.monotonic() < deadline_s, f"nobody told {what}"
        time.sleep(0.02)
