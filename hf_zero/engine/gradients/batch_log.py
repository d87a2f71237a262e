"""Which micro-batches a step had, to name the one that brought a gradient that is not finite."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...buckets.bucket import Row
from ...comm.transport import Transport


class BatchLog:
    """Keeps the losses of a step's micro-batches, where the model returns one, without waiting for the device.

    Attributes:
        step: the number of the step that is under way, from 1.
    """

    def __init__(self, model: nn.Module, transport: Transport):
        self._model = model
        self._transport = transport
        self._losses: list[torch.Tensor | None] = []
        self.step = 1

    def forward(self, outputs: object) -> None:
        """Called behind each forward that trains."""
        found = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
        if found is None and isinstance(outputs, Mapping):
            found = outputs.get("loss")
        is_loss = isinstance(found, torch.Tensor) and found.numel() == 1
        self._losses.append(found.detach() if is_loss and isinstance(found, torch.Tensor) else None)

    def end_step(self) -> None:
        """Called behind each step, and each that was skipped."""
        self.step += 1
        self.forget()

    def forget(self) -> None:
        """The micro-batches until now are none of this step's."""
        self._losses.clear()

    def where_from(self, rows: Sequence[Row]) -> str:
        """Where a gradient that is not finite comes from, in sentences; the same on all ranks. Collective.

        Args:
            rows: this rank's, with their gradients.
        """
        place_of = {name: place for place, (name, _) in enumerate(self._model.named_parameters())}
        mine = [r.slot.name for r in rows if r.tensor.grad is not None and not torch.isfinite(r.tensor.grad).all()]
        bad_losses = [
            (micro + 1, loss.item())
            for micro, loss in enumerate(self._losses)
            if loss is not None and not torch.isfinite(loss)
        ]
        known = sum(loss is not None for loss in self._losses)
        rank = dist.get_rank() if dist.is_initialized() else 0
        everyone = self._transport.exchange((rank, mine, bad_losses, known))
        # Backward goes from the last parameter to the first: what is wrong in a layer is wrong in all those before it.
        names = sorted({name for _, theirs, _, _ in everyone for name in theirs}, key=lambda n: -place_of.get(n, 0))
        return f"{_of_parameters(names)}{self._of_batches(everyone)}"

    def _of_batches(self, everyone: Sequence[tuple[int, list[str], list[tuple[int, float]], int]]) -> str:
        count = max(len(self._losses), 1)
        step = f"It is step {self.step} since the engine was built"
        for rank, _, bad, _ in everyone:
            if bad:
                micro, loss = bad[0]
                of = f", micro-batch {micro} of {count}" if count > 1 else ""
                return f"{step}{of} on rank {rank}: its loss is {loss}. "
        if all(known for _, _, _, known in everyone):
            return f"{step}; the losses that the model returned in it are finite on all ranks. "
        return f"{step}. "


def _of_parameters(names: Sequence[str]) -> str:
    """
    Args:
        names: in the order of backward.
    """
    if not names:
        return ""
    unit, _, _ = names[0].rpartition(".")
    more = f", and {len(names) - 1} more behind it" if len(names) > 1 else ""
    return f"First parameters in backward: {', '.join(names[:3])} (in {unit or 'the model itself'}{more}). "
