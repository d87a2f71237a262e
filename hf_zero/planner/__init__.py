"""Plans a run before its start: which settings fit, their costs, and the choice among them.

An extra: `hf-zero plan`, `hf_zero.make_plan` and `stage: auto` use this room. A run with a stage of its own does not.
"""
