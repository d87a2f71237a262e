"""A pitfall of torchrun: restarted workers use the store of their predecessors."""

import os
from collections.abc import Mapping


def trap_of_agents_store(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns a setting to add if restarted workers would fail or hang; None otherwise.

    torch 2.13's agents keep one store for all restarts. Workers may find the addresses of their predecessors in this store.
    And if the first node is lost, the remaining nodes look for the store at the lost node's address.

    Args:
        environment: a worker's environment variables.
    """
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_restarted = int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    if not (is_shared and is_restarted):
        return None
    return (
        "hf_zero: torchrun's workers share a store that is kept when they are restarted. The restarted workers find the "
        "addresses of the earlier ones in it, or look for it on a lost node, and fail or hang. Set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each node."
    )
