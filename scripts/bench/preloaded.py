"""Imported by the process that forks the ranks: makes the ranks' imports, and excludes them from garbage collections.

Imported objects stay, and repeated collections over them take a seventh of the import time. A collection also writes to each
object it visits, and a forked process would then copy the shared memory.
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
# At exit, nanobind would report objects it cannot free as leaks. A forked rank ends without this call.
atexit.register(gc.unfreeze)
