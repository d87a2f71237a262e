"""Plans a run before its start: which settings fit, their costs, and the choice among them.

The command is `hf-zero plan`, the function `hf_zero.make_plan`, the setting `stage: auto`. A run with a stage of its own asks for
no more than the forecast of its peak memory, and goes without where this room is missing. Its tests are in `tests/planner/`.
"""
