"""Extra: sequences that several ranks compute together.

The core imports this package only through `hf_zero/extras.py`, and trains without the folder.
"""
