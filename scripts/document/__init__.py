"""Writes the parts of the documentation that are made from the code: `python scripts/write_docs.py`."""
