"""Plans a run before it starts: which settings fit, what they cost, and which to choose.

An extra: `hf-zero plan`, `hf_zero.make_plan` and `stage: auto` use this room. A run with a stage of its own does not.
"""
