"""Collectives under torch.profiler: ranges that name them, and no crash where one outlasts the profile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import profiler


@contextmanager
def shown(what: object) -> Iterator[None]:
    """A range "hf_zero: `what`" in a running profile; nothing without one."""
    if not profiler._is_profiler_enabled:
        yield
        return
    with profiler.record_function(f"hf_zero: {what}"):
        yield


@contextmanager
def hidden_from_profiler() -> Iterator[None]:
    """What starts inside leaves no events of its own in a running profile.

    gloo's work objects note their end in the event of their start. Where the profile has ended in between, as behind the last
    step that it saw, its events are freed memory: the process crashes then or later. Here `shown` ranges stand in their place.
    """
    if not profiler._is_profiler_enabled:
        yield
        return
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)
