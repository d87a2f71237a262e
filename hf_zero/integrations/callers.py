"""Finds the object under construction, for hooks of accelerate and transformers that do not pass the object."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def find_in_callers(wanted: Callable[[Any], bool], *, depth: int = 12) -> Any | None:
    """Returns the nearest `self` among the callers' frames for which `wanted` is true, or None within `depth` frames."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return None
        candidate = frame.f_locals.get("self")
        if candidate is not None and wanted(candidate):
            return candidate
        frame = frame.f_back
    return None


def trainer_in_callers() -> Any | None:
    """Returns the Trainer whose method is running further up the stack, or None."""
    if "transformers.trainer" not in sys.modules:
        # Do not import transformers only for this check: a plain loop may not use transformers, and the import takes seconds.
        return None
    from transformers import Trainer

    # One more frame, for this function itself.
    return find_in_callers(lambda candidate: isinstance(candidate, Trainer), depth=13)
