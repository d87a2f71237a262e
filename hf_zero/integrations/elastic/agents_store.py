"""A trap of torchrun on several nodes: workers that meet in the store of the first node's agent."""

import os
from collections.abc import Mapping


def trap_of_agents_store(environment: Mapping[str, str] = os.environ) -> str | None:
    """What to set where the loss of the first node would leave restarted workers hanging; None where nothing is wrong.

    Agents that stay keep the address of that node, and give it to the workers that they start (torch 2.13).

    Args:
        environment: of a worker.
    """
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_restarted = int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    if not (is_shared and is_restarted and int(environment.get("GROUP_WORLD_SIZE") or 1) > 1):
        return None
    return (
        "hf_zero: torchrun's workers meet in the store of the first node's agent. If that node is lost, the workers that are "
        "started again look for it at its old address and hang. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, on each "
        "node."
    )
