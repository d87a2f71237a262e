"""Plans a run before its start: the settings that fit, their costs, and the choice among them.

The command is `hf-zero plan`, the function `hf_zero.make_plan`, the setting `stage: auto`. A run with a fixed stage uses only
the forecast of its peak memory, and skips the forecast if this folder is not installed. The tests are in `tests/planner/`.
"""
