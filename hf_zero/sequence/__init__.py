"""Sequence parallelism: several ranks compute one sequence together. An extra of the package.

The core imports this package only through `hf_zero/extras.py`, and trains without the folder.
"""
