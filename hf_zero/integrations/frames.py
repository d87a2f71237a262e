"""Finding the object under construction that a hook of accelerate or transformers does not pass."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def find_in_callers(wanted: Callable[[Any], bool], *, depth: int = 12) -> Any | None:
    """The nearest `self` among the callers' frames for which `wanted` is true, or None within `depth` frames."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return None
        candidate = frame.f_locals.get("self")
        if candidate is not None and wanted(candidate):
            return candidate
        frame = frame.f_back
    return None
