"""Sums whose order is the same in every run.

Squares are summed in float32 over parts of 65,536 elements, and in float64 over the parts. A single float32 accumulator over
millions of elements would lose the seventh digit, to which clipping norms are compared.
"""

from collections.abc import Sequence

import torch

PART_NUMEL = 1 << 16
_SHORT_ROW_NUMEL = 1 << 9


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a flat tensor, as a float64 scalar on its device; NaN or inf if an element is."""
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    # torch adds 16-bit elements one by one and loses the sixth digit over a part. Short rows keep the seventh digit.
    row_numel = PART_NUMEL if flat.dtype == torch.float32 else _SHORT_ROW_NUMEL
    whole = flat.numel() // row_numel * row_numel
    parts = [flat[:whole].view(-1, row_numel), flat[whole:].view(1, -1)]
    dtype = torch.promote_types(flat.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(p, dim=1, dtype=dtype) for p in parts if p.numel()]
    return torch.cat(norms).double().square_().sum()


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`sum_of_squares` of each tensor, as a float64 vector. There is at least one tensor; all are contiguous, on one device."""
    # Most parameters of a model fit in one part. A single call computes all their norms.
    is_short = [t.dtype is torch.float32 and 0 < t.numel() < PART_NUMEL for t in tensors]
    short = [t for t, one_part in zip(tensors, is_short) if one_part]
    squares = torch.stack(torch._foreach_norm(short)).double().square_() if short else torch.empty(0)
    if len(short) == len(tensors):
        return squares
    found = iter(squares)
    return torch.stack(
        [next(found) if one_part else sum_of_squares(t.reshape(-1)) for t, one_part in zip(tensors, is_short)]
    )


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Computes `out = ((parts[0] + parts[1]) + parts[2]) + …`, so the result does not depend on the order of arrival.

    Args:
        parts: one flat tensor for each rank, of equal numel and dtype; all but the last may be overwritten.
        out: flat, same numel; may share memory with any part. If its dtype is wider, the sum is computed in that dtype.
    """
    if len(parts) == 1:
        if out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    if out.dtype == parts[0].dtype:
        total = parts[0]
        for part in parts[1:-1]:
            total.add_(part)
        # Write to `out` last, because `out` may share memory with a part not yet added.
        torch.add(total, parts[-1], out=out)
        return
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
