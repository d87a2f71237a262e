"""Extra: sequences that several ranks compute together.

The core imports none of this but through `hf_zero/extras.py`, and trains without the folder.
"""
