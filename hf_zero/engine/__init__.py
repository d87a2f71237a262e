"""Builds an engine from a model and its optimizers, and reads and writes its state."""

from ..versions import refuse_old_libraries

refuse_old_libraries()
