"""Collectives under torch.profiler: ranges with their names, and no crash if one outlasts the profile."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler

_NOTHING = nullcontext()


def shown(does: str, what: object) -> AbstractContextManager:
    """Opens a range "hf_zero: `does` `what`" in a running profile; without a profile, does nothing."""
    return profiler.record_function(f"hf_zero: {does} {what}") if profiler._is_profiler_enabled else _NOTHING


def hidden_from_profiler() -> AbstractContextManager:
    """Suppresses profiler events of work started inside the context. The ranges of `shown` replace these events."""
    # gloo's work objects record their end in the event of their start. If the profile has ended in between, for example after
    # its last step, the event is freed memory, and the process crashes sooner or later.
    return _hidden() if profiler._is_profiler_enabled else _NOTHING


@contextmanager
def _hidden() -> Iterator[None]:
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)
