"""Small values between the ranks, before there is an engine."""

from typing import Any

import torch.distributed as dist

from ...comm.transport import Value


def exchange_between_ranks(value: Value) -> list[Value]:
    """Every rank's picklable value in rank order. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
