"""Sum of the ranks' parts in rank order."""

from collections.abc import Sequence

import torch


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """`out = ((parts[0] + parts[1]) + parts[2]) + …`, so that the result does not depend on who arrived first.

    Args:
        parts: one flat tensor a rank, of equal numel and dtype; all but the last may be overwritten.
        out: flat, same numel; may share memory with any part. With a wider dtype the sum is taken in that dtype.
    """
    if len(parts) == 1:
        if out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    if out.dtype == parts[0].dtype:
        total = parts[0]
        for part in parts[1:-1]:
            total.add_(part)
        torch.add(total, parts[-1], out=out)
        return
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
