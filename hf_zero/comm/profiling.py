"""Collectives under torch.profiler: ranges that name them, and no crash where one outlasts the profile."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler

_NOTHING = nullcontext()


def shown(does: str, what: object) -> AbstractContextManager:
    """A range "hf_zero: `does` `what`" in a running profile; nothing without one."""
    return profiler.record_function(f"hf_zero: {does} {what}") if profiler._is_profiler_enabled else _NOTHING


def hidden_from_profiler() -> AbstractContextManager:
    """What starts inside leaves no events of its own in a running profile.

    gloo's work objects note their end in the event of their start. Where the profile has ended in between, as behind the last
    step that it saw, its events are freed memory: the process crashes then or later. Here `shown` ranges stand in their place.
    """
    return _hidden() if profiler._is_profiler_enabled else _NOTHING


@contextmanager
def _hidden() -> Iterator[None]:
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)
