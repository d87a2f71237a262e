"""Sums over a flat gradient shard."""

import torch

_CHUNK_NUMEL = 1 << 16


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a flat tensor, as a float64 scalar on its device; NaN or inf where an element is.

    Chunks of 65,536 elements are summed in float32 and their sums in float64: one float32 accumulator over millions of
    elements would lose the seventh digit that the clipping norm is compared in.
    """
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    whole = flat.numel() // _CHUNK_NUMEL * _CHUNK_NUMEL
    chunks = [flat[:whole].view(-1, _CHUNK_NUMEL), flat[whole:].view(1, -1)]
    norms = [torch.linalg.vector_norm(c, dim=1, dtype=torch.float32) for c in chunks if c.numel()]
    return torch.cat(norms).double().square_().sum()
