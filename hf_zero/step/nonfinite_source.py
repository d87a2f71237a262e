"""Names the parameters and the micro-batch from which a NaN or infinite gradient has come."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..buckets.bucket import Row
from ..comm.transport import Transport


def where_from(
    model: nn.Module, transport: Transport, losses: Sequence[torch.Tensor | None], rows: Sequence[Row]
) -> str:
    """Describes the source of a NaN or infinite gradient in sentences, equal on all ranks. Collective.

    Args:
        model: the model with the parameters' names.
        transport: connects the ranks that step together.
        losses: the loss of each micro-batch of the step; None if the model returned no loss.
        rows: this rank's rows with their gradients.
    """
    index_of = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    mine = [r.slot.name for r in rows if r.tensor.grad is not None and not torch.isfinite(r.tensor.grad).all()]
    bad_losses = [
        (micro + 1, loss.item()) for micro, loss in enumerate(losses) if loss is not None and not torch.isfinite(loss)
    ]
    known = sum(loss is not None for loss in losses)
    rank = dist.get_rank() if dist.is_initialized() else 0
    everyone = transport.exchange((rank, mine, bad_losses, known))
    # Backward runs from the last parameter to the first, so a bad gradient makes the gradients of all earlier layers bad.
    names = sorted({name for _, theirs, _, _ in everyone for name in theirs}, key=lambda n: -index_of.get(n, 0))
    return f"{_of_parameters(names)}{_of_batches(everyone, len(losses), transport.watch.log.step + 1)}"


def _of_batches(
    everyone: Sequence[tuple[int, list[str], list[tuple[int, float]], int]], batches: int, number: int
) -> str:
    count = max(batches, 1)
    step = f"This is step {number} since the engine was built"
    for rank, _, bad, _ in everyone:
        if bad:
            micro, loss = bad[0]
            of = f", micro-batch {micro} of {count}" if count > 1 else ""
            return f"{step}{of} on rank {rank}: its loss is {loss}. "
    if all(known for _, _, _, known in everyone):
        return f"{step}; all losses that the model returned in it are finite on all ranks. "
    return f"{step}. "


def _of_parameters(names: Sequence[str]) -> str:
    """
    Args:
        names: in the order of backward.
    """
    if not names:
        return ""
    unit, _, _ = names[0].rpartition(".")
    more = f"; {len(names) - 1} more after it" if len(names) > 1 else ""
    return f"First bad gradients in backward: {', '.join(names[:3])} (the first is in {unit or 'the model itself'}{more}). "
