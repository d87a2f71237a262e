"""Where in the model each bucketed parameter hangs, and whether it still does."""

from collections.abc import Iterable

import torch
from torch import nn

from .buckets import Bucket, ParameterSlot
from .sharded_parameter import look_only, show_values


class Homes:
    """The (module, attribute) places of every parameter in the buckets; tied ones have several.

    A parameter leaves the engine in two ways: its data moves (`.to(dtype)`, `.half()`), or another Parameter takes its place
    (`load_state_dict(assign=True)`, resize_token_embeddings, merge_and_unload). Steps would then update memory that the model
    no longer reads.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket]):
        slot_of = {slot.parameter: slot for bucket in buckets for slot in bucket.slots}
        self._places = [
            (module, name, slot_of[parameter])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in slot_of
        ]

    def first_stray(self) -> ParameterSlot | None:
        """A slot whose parameter the model does not read any more, or None."""
        for module, name, slot in self._places:
            if module._parameters.get(name) is not slot.parameter or not slot.bucket.holds(slot):
                return slot
        return None

    def refuse_strays(self) -> None:
        """Raises `RuntimeError` for a parameter that a step would not reach."""
        stray = self.first_stray()
        if stray is not None:
            raise RuntimeError(
                f"hf_zero: {stray.name!r} has left the engine's memory since it was prepared (by .to(), .half(), "
                "load_state_dict(assign=True), resize_token_embeddings or merge_and_unload), so a step would not reach it. Do "
                "that before accelerator.prepare, or call engine_of(model).readopt() after it."
            )

    def take_back(self) -> None:
        """Copies strayed values into their slots and hangs the engine's parameters back in their places.

        Raises:
            ValueError: one has another number of elements now.
        """
        for module, name, slot in self._places:
            current = module._parameters.get(name)
            if current is None or current.numel() != slot.interval.numel:
                raise ValueError(
                    f"hf_zero: {slot.name!r} had {slot.interval.numel} elements and has "
                    f"{'none' if current is None else current.numel()} now. Change the model before accelerator.prepare, or "
                    "prepare model and optimizer anew."
                )
            if current is not slot.parameter:
                show_values(slot.parameter)
                with torch.no_grad():
                    slot.parameter.data = current.detach().to(slot.parameter.device)
                module._parameters[name] = slot.parameter
            if not slot.bucket.holds(slot):
                slot.bucket.adopt(slot)
                slot.version = -1


def refuse_unfrozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises `RuntimeError` for a parameter that was frozen when the model was prepared, and is not now."""
    with look_only():
        thawed = next((name for name, parameter in frozen if parameter.requires_grad), None)
    if thawed is not None:
        raise RuntimeError(
            f"hf_zero: {thawed!r} was frozen when the model was prepared and has requires_grad now, so its gradient would "
            "stay on each rank. Prepare model and optimizer anew after unfreezing. (Freezing a trained parameter needs "
            "nothing.)"
        )
