"""Logs a run, and makes one HTML page of the log: loss, speed, the use of time, memory and bytes, and problems.

The setting is `report`; a loop around ZeroEngine uses `hf_zero.RunRecorder`; the command is `hf-zero report`. The tests are in
`tests/report/`.
"""
