"""Extra: sequences computed by several ranks together.

The core imports this package only through `hf_zero/extras.py`, and trains without the folder.
"""
