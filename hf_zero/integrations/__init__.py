"""How scripts turn hf_zero on: accelerate plugin, Trainer callback, flags, and the command prefix."""

from ..versions import refuse_old_libraries

refuse_old_libraries()
