"""Imported by the process that forks the ranks: imports what ranks use, and keeps it out of every garbage collection.

What is imported stays, and looking through it again and again takes a seventh of its time. A collection writes to each object
that it visits, and a forked process then copies the memory that it shared till then.
"""

import atexit
import gc
import importlib
import os
from contextlib import suppress

gc.disable()
for name in os.environ.get("PRELOADED_MODULES", "torch").split(","):
    with suppress(ImportError):
        importlib.import_module(name)
gc.collect()
gc.freeze()
gc.enable()
# At its end, nanobind would name what it cannot free as leaked. A forked rank ends without this.
atexit.register(gc.unfreeze)
