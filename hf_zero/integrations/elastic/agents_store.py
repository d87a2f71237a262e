"""A trap of torchrun: workers that are started again meet in the store of those before them."""

import os
from collections.abc import Mapping


def trap_of_agents_store(environment: Mapping[str, str] = os.environ) -> str | None:
    """What to set where workers that are started again would fail or hang; None where nothing is wrong.

    torch 2.13's agents keep one store for all starts. Workers may find there the addresses of those that were before them; and
    where the first node is lost, the others look for the store at its old address.

    Args:
        environment: of a worker.
    """
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_restarted = int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    if not (is_shared and is_restarted):
        return None
    return (
        "hf_zero: torchrun's workers meet in a store that outlives them. Those that are started again find the addresses of the "
        "earlier ones in it, or look for it on a node that is lost, and fail or hang. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
        "for torchrun, on each node."
    )
