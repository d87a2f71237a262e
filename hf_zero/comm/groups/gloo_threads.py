"""The threads in which gloo receives leave a core that is busy to the thread that computes there.

[Note: a lock and a core]
gloo's thread may not touch a connection while another thread starts a send or receive on it, and asks again at once until it
may. A message that arrives just then wakes gloo's thread, and where all cores are busy the system gives it the core of the
very thread that it waits for. It then asks for milliseconds, for a call that takes microseconds: with two ranks on two cores
that was most of what a small collective cost. A batch thread takes no core from a thread that runs. It takes a free one as
before, and else has its turn when the other waits or has used up its own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


@contextmanager
def in_batch() -> Iterator[None]:
    """Has the threads that gloo makes inside run as batch threads; see [Note: a lock and a core]. On Linux alone."""
    if not (hasattr(os, "SCHED_BATCH") and _THREADS.is_dir()):
        yield
        return
    before = receiving_threads()
    yield
    for thread in receiving_threads() - before:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except PermissionError:
            # A sandbox may forbid it. Training is the same, and slower where all cores are busy.
            return
        except ProcessLookupError:
            # Its group has gone meanwhile.
            continue


def receiving_threads() -> set[int]:
    """The threads of this process in which gloo receives, by the numbers that the system has for them."""
    found = set()
    for each in _THREADS.iterdir():
        try:
            name = (each / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            # A thread that has ended since they were listed.
            continue
        if name == _NAME:
            found.add(int(each.name))
    return found
