"""Logs a run, and makes one HTML page of the log: loss, speed, where time, memory and bytes went, and what went wrong.

The setting is `report`, in a loop around ZeroEngine `hf_zero.RunRecorder`, the command `hf-zero report`. Its tests are in
`tests/report/`.
"""
