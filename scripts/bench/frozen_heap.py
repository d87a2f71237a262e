"""Imported last by the process that forks the ranks: what it has loaded is left out of every later garbage collection.

A collection writes to each object that it visits, and a forked process then copies the memory that it shared till then.
"""

import atexit
import gc

gc.collect()
gc.freeze()
gc.enable()
# At its end, nanobind would name what it cannot free as leaked. A forked rank ends without this.
atexit.register(gc.unfreeze)
